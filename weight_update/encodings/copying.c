/* Copies of memory that does not overlap. dense.py calls them by ctypes, without the interpreter lock. */

#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#endif

int wu_version = 1; /* of the functions here; dense.py uses no other, as may be left from an earlier build */

/* Copy past the caches. An ordinary store reads its cache line from memory first, which is a third of all
   traffic when neither end is in a cache. */
static void stream(uint8_t *to, const uint8_t *from, size_t n)
{
#ifdef __SSE2__
    size_t head = -(uintptr_t)to & 15;
    if (head > n)
        head = n;
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= 64; to += 64, from += 64, n -= 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from), b = _mm_loadu_si128((const __m128i *)from + 1);
        __m128i c = _mm_loadu_si128((const __m128i *)from + 2), d = _mm_loadu_si128((const __m128i *)from + 3);
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)to + 1, b);
        _mm_stream_si128((__m128i *)to + 2, c);
        _mm_stream_si128((__m128i *)to + 3, d);
    }
#endif
    memcpy(to, from, n);
}

/* Copy `n` pieces of memory: the bytes from `first` to `stop`, counted through all pieces. */
void wu_copy(const uint64_t *targets, const uint64_t *sources, const int64_t *sizes, int64_t n, int64_t first,
             int64_t stop, int past_caches)
{
    for (int64_t i = 0; i < n && stop > 0; first -= sizes[i], stop -= sizes[i], i++) {
        int64_t from = first > 0 ? first : 0, to = stop < sizes[i] ? stop : sizes[i];
        if (from >= to)
            continue;
        uint8_t *target = (uint8_t *)(uintptr_t)targets[i] + from;
        const uint8_t *source = (const uint8_t *)(uintptr_t)sources[i] + from;
        if (past_caches)
            stream(target, source, (size_t)(to - from));
        else
            memcpy(target, source, (size_t)(to - from));
    }
#ifdef __SSE2__
    if (past_caches)
        _mm_sfence(); /* other processes see the bytes before they see what the caller writes next */
#endif
}

/* An empty module, so that tools that import every module of a package can import this one. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copying", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copying(void)
{
    return PyModule_Create(&module);
}
