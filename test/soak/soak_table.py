"""The account of a soak as text, and of several as a table."""

from __future__ import annotations

from typing import Any

from soak_worker import BROKEN

_COLUMNS = (
    "Scheme",
    "Minutes",
    "Updates",
    "Faults",
    "Passes",
    "Broken",
    "Hangs",
    "Errors",
    "Lost workers",
    "Worst send (s)",
    "Memory (MB)",
    "Descriptors",
    "Threads",
)


def name_of(account: dict[str, Any]) -> str:
    """Return what ran, in words."""
    words = [account["scheme"], "with hosts" if account["hosts"] else "", account["encoding"]]
    words += [account["compression"] if account["compression"] != "none" else "", account["peer"] or ""]
    return ", ".join(filter(None, words))


def summary(account: dict[str, Any]) -> str:
    """Return an account as lines."""
    held = account["held"]
    lines = [f"{name_of(account)}: {account['seconds']:.0f} s, seed {account['seed']}"]
    faults = ", ".join(f"{name} {number}" for name, number in account["faults"].items())
    rows = {
        "updates": f"{account['updates']:,}, {account['failed_updates']:,} with failures",
        "faults": f"{sum(account['faults'].values())}: {faults}",
        "passes checked": f"{account['passes']:,}",
        **{f"passes {name.replace('_', ' ')}": f"{account[name]:,}" for name in BROKEN},
        "worst send": f"{account['worst_send_seconds']:.2f} s, timeout {account['timeout']:g} s",
        "slowest start, join": "{slowest_start_seconds:.1f} s, {slowest_join_seconds:.1f} s".format(
            **account
        ),
        "hangs": str(account["hangs"]),
        "errors of send()": str(account["send_errors"]),
        "workers lost": str(account["lost_workers"]),
    }
    if "rounds" in account:
        rows["rounds"] = str(account["rounds"])
    for who in held["last"]:
        rows[f"held by {who}"] = "; ".join(_change(held, who, name) for name in held["last"][who])
    lines += [f"  {name:<20} {text}" for name, text in rows.items()]
    lines += [f"  failed {number:>6} x  {text}" for text, number in account.get("failures", {}).items()]
    lines += [f"  BROKEN {kind}: {text}" for kind, text in account["problems"][:20]]
    return "\n".join(lines)


def _change(held: dict[str, Any], who: str, name: str) -> str:
    before, after = (held[window].get(who, {}).get(name, 0) for window in ("first", "last"))
    if name == "memory":
        return f"memory {before / 1e6:.0f} -> {after / 1e6:.0f} MB"
    return f"{name} {before} -> {after}"


def table(accounts: list[dict[str, Any]]) -> str:
    """Return a table in reStructuredText, one row for each account."""
    rows = [_COLUMNS, *map(_cells, accounts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    rule = "  ".join("=" * width for width in widths)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([rule, lines[0].rstrip(), rule, *(line.rstrip() for line in lines[1:]), rule])


def _cells(account: dict[str, Any]) -> tuple[str, ...]:
    held = account["held"]

    def both(name: str, unit: float = 1.0) -> str:
        ends = [held[window].get("all", {}).get(name) for window in ("first", "last")]
        return "not reached" if None in ends else " → ".join(f"{end / unit:.0f}" for end in ends)

    return (
        name_of(account),
        f"{account['seconds'] / 60:.1f}",
        f"{account['updates']:,}",
        f"{sum(account['faults'].values())}",
        f"{account['passes']:,}",
        f"{sum(account[name] for name in BROKEN):,}",
        str(account["hangs"]),
        str(account["send_errors"]),
        str(account["lost_workers"]),
        f"{account['worst_send_seconds']:.2f}",
        both("memory", 1e6),
        both("descriptors"),
        both("threads"),
    )
