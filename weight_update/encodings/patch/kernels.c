/* Inner loops of the patch encoding. kernels.py calls them by ctypes, without the interpreter lock.

   Nothing here allocates memory or trusts counts: callers give arrays that are large enough, and
   wu_join_* checks what it reads. */

#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX512 1
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi2,popcnt")))
#define CLONES __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define CLONES
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

/* Write position and value of each element of `now` that differs from `old`, and return their number.
   A value is the new bits, or with `relative` new - old. `where` and `out` have room for `n` items. */
#define DIFF(T)                                                                                        \
    static int64_t diff_##T(const T *now, const T *old, int64_t n, int relative, int32_t *where, T *out) \
    {                                                                                                  \
        enum { BLOCK = 64 / sizeof(T) };                                                               \
        int64_t found = 0, i = 0;                                                                      \
        while (i < n) {                                                                                \
            int64_t end = n - i < BLOCK ? n : i + BLOCK;                                               \
            if (memcmp(now + i, old + i, (end - i) * sizeof(T)) == 0) {                                \
                i = end;                                                                               \
                continue;                                                                              \
            }                                                                                          \
            for (; i < end; i++) { /* without a branch: it would often be mispredicted */               \
                where[found] = (int32_t)i;                                                             \
                out[found] = (T)(now[i] - (relative ? old[i] : 0));                                    \
                found += now[i] != old[i];                                                             \
            }                                                                                          \
        }                                                                                              \
        return found;                                                                                  \
    }

DIFF(u8)
DIFF(u16)
DIFF(u32)
DIFF(u64)

#ifdef HAS_AVX512
AVX512 static int64_t fast_u16(const u16 *now, const u16 *old, int64_t n, int relative, int32_t *where, u16 *out)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t found = 0, i = 0;
    for (; i + 32 <= n; i += 32) {
        __m512i x = _mm512_loadu_si512(now + i), y = _mm512_loadu_si512(old + i);
        __mmask32 hit = _mm512_cmpneq_epi16_mask(x, y);
        if (!hit)
            continue;
        if (relative)
            x = _mm512_sub_epi16(x, y);
        int count = _mm_popcnt_u32(hit), low = _mm_popcnt_u32(hit & 0xffff);
        __m512i at = _mm512_add_epi32(lane, _mm512_set1_epi32((int)i));
        __m512i next = _mm512_add_epi32(at, _mm512_set1_epi32(16));
        if (found + 64 <= n) { /* whole vectors fit */
            _mm512_storeu_si512(out + found, _mm512_maskz_compress_epi16(hit, x));
            _mm512_storeu_si512(where + found, _mm512_maskz_compress_epi32((__mmask16)hit, at));
            _mm512_storeu_si512(where + found + low, _mm512_maskz_compress_epi32((__mmask16)(hit >> 16), next));
        } else {
            _mm512_mask_compressstoreu_epi16(out + found, hit, x);
            _mm512_mask_compressstoreu_epi32(where + found, (__mmask16)hit, at);
            _mm512_mask_compressstoreu_epi32(where + found + low, (__mmask16)(hit >> 16), next);
        }
        found += count;
    }
    int64_t rest = diff_u16(now + i, old + i, n - i, relative, where + found, out + found);
    for (int64_t k = 0; k < rest; k++)
        where[found + k] += (int32_t)i;
    return found + rest;
}

AVX512 static int64_t fast_u32(const u32 *now, const u32 *old, int64_t n, int relative, int32_t *where, u32 *out)
{
    const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    int64_t found = 0, i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512i x = _mm512_loadu_si512(now + i), y = _mm512_loadu_si512(old + i);
        __mmask16 hit = _mm512_cmpneq_epi32_mask(x, y);
        if (!hit)
            continue;
        if (relative)
            x = _mm512_sub_epi32(x, y);
        _mm512_mask_compressstoreu_epi32(out + found, hit, x);
        _mm512_mask_compressstoreu_epi32(where + found, hit, _mm512_add_epi32(lane, _mm512_set1_epi32((int)i)));
        found += _mm_popcnt_u32(hit);
    }
    int64_t rest = diff_u32(now + i, old + i, n - i, relative, where + found, out + found);
    for (int64_t k = 0; k < rest; k++)
        where[found + k] += (int32_t)i;
    return found + rest;
}

int wu_portable = 0; /* tests set it, to take the other branch of wu_diff() */

static int has_avx512(void)
{
    return !wu_portable && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}
#endif

int64_t wu_diff(int width, const void *now, const void *old, int64_t n, int relative, int32_t *where, void *out)
{
#ifdef HAS_AVX512
    if (width == 2 && has_avx512())
        return fast_u16(now, old, n, relative, where, out);
    if (width == 4 && has_avx512())
        return fast_u32(now, old, n, relative, where, out);
#endif
    switch (width) {
    case 1:
        return diff_u8(now, old, n, relative, where, out);
    case 2:
        return diff_u16(now, old, n, relative, where, out);
    case 4:
        return diff_u32(now, old, n, relative, where, out);
    default:
        return diff_u64(now, old, n, relative, where, out);
    }
}

/* Gaps between increasing positions: `first` + offsets[k], after the position `before`. `needed[j]` is set to
   the number of units of 1, 2 and 4 bytes that the gaps take. */
#define COUNT(T)                                                                                       \
    void wu_count_##T(const T *offsets, int64_t n, int64_t first, int64_t before, int64_t needed[3])   \
    {                                                                                                  \
        int64_t one = n, two = n, four = n, last = before - first;                                     \
        for (int64_t k = 0; k < n; k++) {                                                              \
            u64 gap = (u64)((int64_t)offsets[k] - last - 1);                                           \
            last = offsets[k];                                                                         \
            if (gap >= 0xff) {                                                                         \
                one += gap / 0xff;                                                                     \
                two += gap / 0xffff;                                                                   \
                four += gap / 0xffffffff;                                                              \
            }                                                                                          \
        }                                                                                              \
        needed[0] = one, needed[1] = two, needed[2] = four;                                            \
    }

COUNT(int32_t)
COUNT(int64_t)

/* Write the gaps in units whose largest value is an escape; see positions_flat.py. */
#define SPLIT(T, G, U, ESCAPE)                                                                         \
    CLONES static void split_##T##_##U(const T *offsets, int64_t n, u64 gap, U *out)                   \
    {                                                                                                  \
        enum { BLOCK = 64 };                                                                           \
        for (; gap >= ESCAPE; gap -= ESCAPE)                                                           \
            *out++ = (U)ESCAPE;                                                                        \
        *out++ = (U)gap;                                                                               \
        for (int64_t k = 1; k < n; k += BLOCK) {                                                       \
            G gaps[BLOCK];                                                                             \
            int count = n - k < BLOCK ? (int)(n - k) : BLOCK, large = 0;                               \
            for (int j = 0; j < count; j++) {                                                          \
                gaps[j] = (G)offsets[k + j] - (G)offsets[k + j - 1] - 1;                               \
                large |= gaps[j] >= ESCAPE;                                                            \
            }                                                                                          \
            for (int j = 0; j < count && !large; j++)                                                  \
                out[j] = (U)gaps[j];                                                                   \
            if (!large) {                                                                              \
                out += count;                                                                          \
                continue;                                                                              \
            }                                                                                          \
            for (int j = 0; j < count; j++) {                                                          \
                G left = gaps[j];                                                                      \
                for (; left >= ESCAPE; left -= ESCAPE)                                                 \
                    *out++ = (U)ESCAPE;                                                                \
                *out++ = (U)left;                                                                      \
            }                                                                                          \
        }                                                                                              \
    }

#define SPLITS(T, G)                                                                                   \
    SPLIT(T, G, u8, 0xffu)                                                                             \
    SPLIT(T, G, u16, 0xffffu)                                                                          \
    SPLIT(T, G, u32, 0xffffffffu)                                                                      \
    void wu_split_##T(const T *offsets, int64_t n, int64_t first, int64_t before, int size, void *out) \
    {                                                                                                  \
        u64 gap = (u64)(first + offsets[0] - before - 1);                                              \
        if (size == 1)                                                                                 \
            split_##T##_u8(offsets, n, gap, out);                                                      \
        else if (size == 2)                                                                            \
            split_##T##_u16(offsets, n, gap, out);                                                     \
        else                                                                                           \
            split_##T##_u32(offsets, n, gap, out);                                                     \
    }

SPLITS(int32_t, u32)
SPLITS(int64_t, u64)

/* Add up units to `count` positions below `limit`. Return 0 if the units give exactly these, otherwise -1. */
#define JOIN(U, T, ESCAPE)                                                                             \
    static int join_##U##_##T(const U *units, int64_t n, int64_t count, int64_t limit, T *positions)   \
    {                                                                                                  \
        int64_t at = -1, found = 0, i = 0;                                                             \
        for (; i < n; i++) {                                                                           \
            if (units[i] == (U)ESCAPE) {                                                               \
                at += ESCAPE;                                                                          \
                if (at >= limit)                                                                       \
                    return -1;                                                                         \
                continue;                                                                              \
            }                                                                                          \
            at += (int64_t)units[i] + 1;                                                               \
            if (at >= limit || found == count)                                                         \
                return -1;                                                                             \
            positions[found++] = (T)at;                                                                \
        }                                                                                              \
        return found == count && n > 0 && units[n - 1] != (U)ESCAPE ? 0 : -1;                          \
    }

#define JOINS(T)                                                                                       \
    JOIN(u8, T, 0xff)                                                                                  \
    JOIN(u16, T, 0xffff)                                                                               \
    JOIN(u32, T, 0xffffffffLL)                                                                         \
    int wu_join_##T(int size, const void *units, int64_t n, int64_t count, int64_t limit, T *positions) \
    {                                                                                                  \
        if (size == 1)                                                                                 \
            return join_u8_##T(units, n, count, limit, positions);                                     \
        if (size == 2)                                                                                 \
            return join_u16_##T(units, n, count, limit, positions);                                    \
        return join_u32_##T(units, n, count, limit, positions);                                        \
    }

JOINS(int32_t)
JOINS(int64_t)

/* Write values over the elements at `offsets`, or add them. Offsets are trusted. */
#define WRITE(T, O)                                                                                    \
    static void write_##T##_##O(T *to, const O *offsets, const T *values, int64_t n, int relative)     \
    {                                                                                                  \
        if (relative)                                                                                  \
            for (int64_t k = 0; k < n; k++)                                                            \
                to[offsets[k]] += values[k];                                                           \
        else                                                                                           \
            for (int64_t k = 0; k < n; k++)                                                            \
                to[offsets[k]] = values[k];                                                            \
    }

#define WRITES(O)                                                                                      \
    WRITE(u8, O)                                                                                       \
    WRITE(u16, O)                                                                                      \
    WRITE(u32, O)                                                                                      \
    WRITE(u64, O)                                                                                      \
    void wu_write_##O(int width, void *to, const O *offsets, const void *values, int64_t n, int relative) \
    {                                                                                                  \
        if (width == 1)                                                                                \
            write_u8_##O(to, offsets, values, n, relative);                                            \
        else if (width == 2)                                                                           \
            write_u16_##O(to, offsets, values, n, relative);                                           \
        else if (width == 4)                                                                           \
            write_u32_##O(to, offsets, values, n, relative);                                           \
        else                                                                                           \
            write_u64_##O(to, offsets, values, n, relative);                                           \
    }

WRITES(int32_t)
WRITES(int64_t)

/* An empty module, so that tools that import every module of a package can import this one. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModule_Create(&module);
}
