"""Which tests ``make test`` runs; ``make test-all`` runs all of them."""

from __future__ import annotations

import fuzz
import pytest

SMOKE = {
    "test_first_weights",
    "test_params_map",
    "test_mismatch",
    "test_a_model_that_cannot_take_weights",
    "test_receiver_waits_in_vain",
    "test_updates_count_up_and_are_exact",
    "test_given_weights",
    "test_worker_ids",
    "test_send_async",
    "test_receive",
    "test_apply_weights",
    "test_hold",
    "test_exception_while_applying",
    "test_forward_pass_sees_one_version",
    "test_shutdown_of_the_sender",
    "test_shutdown_of_a_worker",
    "test_no_thread_is_left",
}
"""The tests of SchemeContract that run by default for a scheme marked ``smoke``."""


def pytest_configure(config: pytest.Config) -> None:
    fuzz.thorough = "not slow" not in config.option.markexpr


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("smoke") and getattr(item, "originalname", "") not in SMOKE:
            item.add_marker(pytest.mark.slow)
