/* Transfers over a socket, with the sums of their bytes. transfer.py calls them by ctypes, without the
   interpreter lock. */

#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/types.h>

/* Clones are chosen while the library is loaded, which needs glibc and comes too early for sanitizers. */
#if defined(__x86_64__) && defined(__GNUC__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define CLONES __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define CLONES
#endif

int wu_version = 1; /* of the functions here; transfer.py uses no other, as may be left from an earlier build */

enum {
    LANES = 256,
    ROW = 8 * LANES,
    GROUP = 64,       /* lanes whose sums stay in registers while all rows are added */
    STEP = 256 << 10, /* bytes received in one call: they are still in the second-level cache afterwards */
    PATIENCE = 20,    /* milliseconds of one wait here; the caller waits longer */
    WAITS = 16        /* of one call, so that an end which sends a byte now and then does not hold it for long */
};

CLONES static void add_rows(const uint8_t *from, int64_t rows, uint64_t *sums)
{
    for (int first = 0; first < LANES; first += GROUP) {
        const uint64_t *words = (const uint64_t *)from + first;
        uint64_t group[GROUP] = {0};
        for (int64_t row = 0; row < rows; row++, words += LANES)
            for (int lane = 0; lane < GROUP; lane++)
                group[lane] += words[lane];
        for (int lane = 0; lane < GROUP; lane++)
            sums[first + lane] += group[lane];
    }
}

static int is_ready(int fd, short event)
{
    struct pollfd one = {fd, event, 0};
    return poll(&one, 1, PATIENCE) > 0;
}

/* Send (or receive) the bytes of a piece from `*done` on, and advance `*done`. Every row of ROW bytes that is
   complete is added to `sums`. Return 0 when `*done` is `n`, the number of an error, or -1 at the end of the
   stream. EAGAIN says that this takes long, and that the caller looks at the clock.

   Each call to send() offers the whole rest. Calls that fill only a part of the socket's buffer take about twice
   the time over loopback. */
int wu_transfer(int sends, int fd, uint8_t *piece, int64_t n, int64_t *done, uint64_t *sums)
{
    for (int waits = 0; *done < n;) {
        size_t rest = (size_t)(n - *done);
        ssize_t moved = sends ? send(fd, piece + *done, rest, MSG_DONTWAIT | MSG_NOSIGNAL)
                              : recv(fd, piece + *done, rest < STEP ? rest : STEP, MSG_DONTWAIT);
        if (moved < 0 && errno == EAGAIN && ++waits < WAITS && is_ready(fd, sends ? POLLOUT : POLLIN))
            continue;
        if (moved < 0 && errno == EINTR)
            continue;
        if (moved < 0)
            return errno;
        if (moved == 0)
            return -1;
        int64_t row = *done / ROW;
        *done += moved;
        add_rows(piece + row * ROW, *done / ROW - row, sums);
    }
    return 0;
}

/* An empty module, so that tools that import every module of a package can import this one. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_transfer", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__transfer(void)
{
    return PyModule_Create(&module);
}
