/* Inner loops of the encodings. kernels.py calls them by ctypes, without the interpreter lock.

   Nothing here allocates memory. Writers trust the room that their comment demands. Readers (wu_index,
   wu_apply, wu_join) get bytes from the network, and check every position before they use it.

   A gap is the number of elements between a change and the one before. It is written in units of 1, 2 or 4
   bytes whose largest value is an escape: "add it and continue with the next unit". */

#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX512 1
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vbmi,avx512vbmi2,popcnt")))
#endif
/* Clones are chosen while the library is loaded, which needs glibc and comes too early for sanitizers. */
#if defined(HAS_AVX512) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define CLONES __attribute__((target_clones("default", "avx2", "arch=skylake-avx512")))
#else
#define CLONES
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

/* Call NAME_u8, NAME_u16, NAME_u32 or NAME_u64. */
#define BY_WIDTH(width, NAME, ...)                                                                     \
    ((width) == 1   ? NAME##_u8(__VA_ARGS__)                                                           \
     : (width) == 2 ? NAME##_u16(__VA_ARGS__)                                                          \
     : (width) == 4 ? NAME##_u32(__VA_ARGS__)                                                          \
                    : NAME##_u64(__VA_ARGS__))

/* The same for units of 1, 2 or 4 bytes. */
#define BY_SIZE(size, NAME, ...)                                                                       \
    ((size) == 1 ? NAME##_u8(__VA_ARGS__) : (size) == 2 ? NAME##_u16(__VA_ARGS__) : NAME##_u32(__VA_ARGS__))

#define FOR_EACH_WIDTH(MACRO) MACRO(u8) MACRO(u16) MACRO(u32) MACRO(u64)

int wu_version = 4; /* of the functions here; kernels.py uses no other, as may be left from an earlier build */

enum { SLACK = 64 }; /* bytes that scans may write behind the last result */

/* Changes that are found one after the other: gaps in units of 1 byte, and values. */
typedef struct {
    u8 *units;
    void *values;
    int64_t used;  /* units */
    int64_t found; /* values */
    int64_t next;  /* the element after the last change */
} wu_gaps;

/* Elements to compare; the first of them is the element `at`. */
typedef struct {
    u64 now, old; /* addresses */
    int64_t n, at;
    int64_t most;  /* if more than these differ, the tile is left out of the result */
    int64_t found; /* set to the number that differ */
} wu_tile;

/* Write all of a gap but its last unit, which is returned. */
static u8 escapes(wu_gaps *to, u64 gap)
{
    for (; gap >= 0xff; gap -= 0xff)
        to->units[to->used++] = 0xff;
    return (u8)gap;
}

/* Append the elements of `now` that differ from `old`: their gaps, and their bits or with `relative` new - old.
   Needs room for `n` units and values, and SLACK bytes behind each. */
#define SCAN(T)                                                                                        \
    static inline T value_##T(const T *now, const T *old, int64_t i, int relative)                     \
    {                                                                                                  \
        return (T)(now[i] - (relative ? old[i] : 0));                                                  \
    }                                                                                                  \
                                                                                                       \
    static void scan_##T(const T *now, const T *old, int64_t n, int64_t at, int relative, wu_gaps *to) \
    {                                                                                                  \
        enum { BLOCK = 64 };                                                                           \
        for (int64_t i = 0, end; i < n; i = end) {                                                     \
            end = n - i < BLOCK ? n : i + BLOCK;                                                       \
            if (memcmp(now + i, old + i, (size_t)(end - i) * sizeof(T)) == 0)                          \
                continue;                                                                              \
            while (i < end && now[i] == old[i])                                                        \
                i++;                                                                                   \
            if (i == end) /* another thread has written `now` since */                                 \
                continue;                                                                              \
            u8 gap = escapes(to, (u64)(at + i - to->next));                                            \
            u8 *unit = to->units + to->used;                                                           \
            T *value = (T *)to->values + to->found;                                                    \
            int64_t last = i, found = 1;                                                               \
            unit[0] = gap, value[0] = value_##T(now, old, i, relative);                                \
            for (i++; i < end; i++) { /* without a branch: it would often be mispredicted */           \
                int differs = now[i] != old[i];                                                        \
                unit[found] = (u8)(i - last - 1);                                                      \
                value[found] = value_##T(now, old, i, relative);                                       \
                found += differs;                                                                      \
                last = differs ? i : last;                                                             \
            }                                                                                          \
            to->used += found, to->found += found, to->next = at + last + 1;                           \
        }                                                                                              \
    }

FOR_EACH_WIDTH(SCAN)

#ifdef HAS_AVX512
static const u8 LANES_OF_BYTES[64] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21,
    22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43,
    44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63};

/* The same with the instructions of AVX-512 VBMI2, for 64 elements at a time. */
#define FAST(T, MASK, KIND)                                                                            \
    AVX512 static void fast_##T(const T *now, const T *old, int64_t n, int64_t at, int relative, wu_gaps *to) \
    {                                                                                                  \
        enum { VECTORS = sizeof(T), LANES = 64 / sizeof(T) };                                          \
        const __m512i lane = _mm512_loadu_si512(LANES_OF_BYTES), one = _mm512_set1_epi8(1);            \
        T *values = (T *)to->values + to->found;                                                       \
        int64_t i = 0;                                                                                 \
        for (; i + 64 <= n; i += 64) {                                                                 \
            u64 hits = 0;                                                                              \
            for (int v = 0; v < VECTORS; v++) {                                                        \
                const __m512i x = _mm512_loadu_si512(now + i + v * LANES);                             \
                const __m512i y = _mm512_loadu_si512(old + i + v * LANES);                             \
                hits |= (u64)_mm512_cmpneq_##KIND##_mask(x, y) << v * LANES;                           \
            }                                                                                          \
            if (!hits)                                                                                 \
                continue;                                                                              \
            u8 gap = escapes(to, (u64)(at + i + __builtin_ctzll(hits) - to->next));                    \
            __m512i places = _mm512_maskz_compress_epi8(hits, lane);                                   \
            __m512i previous = _mm512_permutexvar_epi8(_mm512_sub_epi8(lane, one), places);            \
            __m512i gaps = _mm512_sub_epi8(_mm512_sub_epi8(places, previous), one);                    \
            _mm512_storeu_si512(to->units + to->used, gaps); /* right but for the first */             \
            to->units[to->used] = gap;                                                                 \
            to->used += __builtin_popcountll(hits);                                                    \
            to->next = at + i + 64 - __builtin_clzll(hits);                                            \
            for (int v = 0; v < VECTORS; v++) {                                                        \
                MASK part = (MASK)(hits >> v * LANES);                                                 \
                __m512i x = _mm512_loadu_si512(now + i + v * LANES);                                   \
                if (relative)                                                                          \
                    x = _mm512_sub_##KIND(x, _mm512_loadu_si512(old + i + v * LANES));                 \
                _mm512_storeu_si512(values, _mm512_maskz_compress_##KIND(part, x));                    \
                values += __builtin_popcountll(part);                                                  \
            }                                                                                          \
        }                                                                                              \
        to->found = values - (T *)to->values;                                                          \
        scan_##T(now + i, old + i, n - i, at + i, relative, to);                                       \
    }

FAST(u8, __mmask64, epi8)
FAST(u16, __mmask32, epi16)
FAST(u32, __mmask16, epi32)
FAST(u64, __mmask8, epi64)

int wu_portable = 0; /* tests set it, to take the other branch of scan() */

static int has_avx512(void)
{
    return !wu_portable && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("popcnt");
}
#else
static int has_avx512(void) { return 0; }
#define fast_u8 scan_u8
#define fast_u16 scan_u16
#define fast_u32 scan_u32
#define fast_u64 scan_u64
#endif

static void scan(int width, const wu_tile *tile, int relative, wu_gaps *to)
{
    const void *now = (const void *)(uintptr_t)tile->now, *old = (const void *)(uintptr_t)tile->old;
    if (has_avx512())
        BY_WIDTH(width, fast, now, old, tile->n, tile->at, relative, to);
    else
        BY_WIDTH(width, scan, now, old, tile->n, tile->at, relative, to);
}

/* Compare tiles in ascending order, and append what differs. Needs room as scan_T does, for all elements from
   the first change that is not coded yet to the end of the last tile. */
void wu_scan(int width, int relative, wu_tile *tiles, int64_t count, wu_gaps *to)
{
    for (int64_t k = 0; k < count; k++) {
        const wu_gaps before = *to;
        scan(width, tiles + k, relative, to);
        tiles[k].found = to->found - before.found;
        if (tiles[k].found > tiles[k].most)
            *to = before;
    }
}

/* Append the gaps of increasing `positions`. Needs room for n units, and one for each 255 elements. */
#define CODE(T)                                                                                        \
    void wu_code_##T(const T *positions, int64_t n, wu_gaps *to)                                       \
    {                                                                                                  \
        for (int64_t k = 0; k < n; k++) {                                                              \
            u8 gap = escapes(to, (u64)((int64_t)positions[k] - to->next));                             \
            to->units[to->used++] = gap;                                                               \
            to->next = (int64_t)positions[k] + 1;                                                      \
        }                                                                                              \
        to->found += n;                                                                                \
    }

CODE(int32_t)
CODE(int64_t)

/* Write gaps in units of 1 byte as units of another size, and return their number. Needs room for `n` units. */
#define WIDEN(U, ESCAPE)                                                                               \
    static int64_t widen_##U(const u8 *units, int64_t n, U *out)                                       \
    {                                                                                                  \
        int64_t used = 0;                                                                              \
        u64 gap = 0;                                                                                   \
        for (int64_t i = 0; i < n; i++) {                                                              \
            gap += units[i];                                                                           \
            if (units[i] == 0xff)                                                                      \
                continue;                                                                              \
            for (; gap >= ESCAPE; gap -= ESCAPE)                                                       \
                out[used++] = (U)ESCAPE;                                                               \
            out[used++] = (U)gap;                                                                      \
            gap = 0;                                                                                   \
        }                                                                                              \
        return used;                                                                                   \
    }

WIDEN(u16, 0xffffu)
WIDEN(u32, 0xffffffffu)

int64_t wu_widen(const u8 *units, int64_t n, int size, void *out)
{
    return size == 2 ? widen_u16(units, n, out) : widen_u32(units, n, out);
}

/* Check that units stand for `count` positions below `limit`, and cut them into parts of `step` positions or
   a little more. A cut is the first unit of a part, its first value, and the element that a gap of 0 means;
   one more cut is the end. Return the number of parts, at most `room`; or -1. */
#define INDEX(U, SUM, ESCAPE)                                                                             \
    CLONES static int64_t index_##U(const U *units, int64_t n, int64_t count, int64_t limit, int64_t step, \
                                    int64_t (*cuts)[3], int64_t room)                                  \
    {                                                                                                  \
        enum { BLOCK = 128 };                                                                          \
        int64_t next = 0, found = 0, due = 0, parts = 0;                                               \
        for (int64_t i = 0; i < n; i += BLOCK) {                                                       \
            if (found >= due && (i == 0 || units[i - 1] != ESCAPE) && parts < room) {                  \
                cuts[parts][0] = i, cuts[parts][1] = found, cuts[parts][2] = next;                     \
                parts++, due = found + step;                                                           \
            }                                                                                          \
            const U *block = units + i;                                                                \
            int length = n - i < BLOCK ? (int)(n - i) : BLOCK;                                         \
            SUM sum = 0;                                                                               \
            u8 ends = 0;                                                                               \
            for (int k = 0; k < length; k++)                                                           \
                sum += block[k];                                                                       \
            for (int k = 0; k < length; k++)                                                           \
                ends += block[k] != ESCAPE;                                                            \
            found += ends;                                                                             \
            next += (int64_t)sum + ends;                                                               \
            if (found > count || next > limit)                                                         \
                return -1;                                                                             \
        }                                                                                              \
        cuts[parts][0] = n, cuts[parts][1] = found, cuts[parts][2] = next;                             \
        return found == count && n > 0 && units[n - 1] != ESCAPE ? parts : -1;                         \
    }

INDEX(u8, u32, 0xffu)
INDEX(u16, u32, 0xffffu)
INDEX(u32, u64, 0xffffffffu)

int64_t wu_index(int size, const void *units, int64_t n, int64_t count, int64_t limit, int64_t step,
                 int64_t (*cuts)[3], int64_t room)
{
    return BY_SIZE(size, index, units, n, count, limit, step, cuts, room);
}

/* A reader of units. */
typedef struct {
    const void *units;
    int64_t n, i;
    int64_t next, limit;
} reader;

/* Read at most `room` positions below the limit. Return their number, or -1 for a position above. */
#define READ(U, ESCAPE)                                                                                \
    static inline int read_##U(reader *from, int64_t *positions, int room)                             \
    {                                                                                                  \
        const U *units = from->units;                                                                  \
        int64_t i = from->i, next = from->next;                                                        \
        int found = 0;                                                                                 \
        for (; i < from->n && found < room; i++) {                                                     \
            next += units[i];                                                                          \
            positions[found] = next;                                                                   \
            found += units[i] != ESCAPE;                                                               \
            next += units[i] != ESCAPE;                                                                \
        }                                                                                              \
        from->i = i, from->next = next;                                                                \
        if (next > from->limit) /* the last position is the largest */                                 \
            return -1;                                                                                 \
        return found;                                                                                  \
    }

READ(u8, 0xffu)
READ(u16, 0xffffu)
READ(u32, 0xffffffffu)

static inline int read_positions(int size, reader *from, int64_t *positions, int room)
{
    return BY_SIZE(size, read, from, positions, room);
}

/* Write `count` values over the elements of `to` that units stand for, or add them. `to` has `limit` elements.
   Return 0 if the units give `count` positions below `limit`; otherwise -1, with some values written.
   The processor does not guess elements that lie APART bytes from each other, on average, or more: those of the
   next block are fetched while this one is written. */
#define APPLY(T)                                                                                       \
    static int apply_##T(T *to, int64_t limit, int size, const void *units, int64_t n,                 \
                         const T *values, int64_t count, int relative)                                 \
    {                                                                                                  \
        enum { BLOCK = 64, APART = 16 };                                                               \
        int64_t blocks[2][BLOCK], done = 0;                                                            \
        reader from = {units, n, 0, 0, limit};                                                         \
        int found = read_positions(size, &from, blocks[0], BLOCK), more;                               \
        for (int now = 0; found > 0; found = more, now ^= 1) {                                         \
            const int64_t *at = blocks[now], *ahead = blocks[now ^ 1];                                 \
            if (found > count - done)                                                                  \
                return -1;                                                                             \
            more = read_positions(size, &from, blocks[now ^ 1], BLOCK);                                \
            if (more > 0 && (size_t)(ahead[more - 1] - ahead[0]) * sizeof(T) > APART * (size_t)more)   \
                for (int k = 0; k < more; k++)                                                         \
                    __builtin_prefetch(to + ahead[k], 1);                                              \
            for (int k = 0; k < found; k++)                                                            \
                to[at[k]] = (T)(values[done + k] + (relative ? to[at[k]] : 0));                        \
            done += found;                                                                             \
        }                                                                                              \
        return found == 0 && done == count ? 0 : -1;                                                   \
    }

FOR_EACH_WIDTH(APPLY)

int wu_apply(int width, void *to, int64_t limit, int size, const void *units, int64_t n, const void *values,
             int64_t count, int relative)
{
    return BY_WIDTH(width, apply, to, limit, size, units, n, values, count, relative);
}

static int ends_with_escape(int size, const void *units, int64_t n)
{
    u8 last[4] = {0};
    memcpy(last, (const u8 *)units + (n - 1) * size, (size_t)size);
    return memcmp(last, "\xff\xff\xff\xff", (size_t)size) == 0;
}

/* Write the `count` positions below `limit` that units stand for. Return 0, or -1 if they stand for others. */
#define JOIN(T)                                                                                        \
    int wu_join_##T(int size, const void *units, int64_t n, int64_t count, int64_t limit, T *positions) \
    {                                                                                                  \
        enum { BLOCK = 64 };                                                                           \
        int64_t block[BLOCK], done = 0;                                                                \
        reader from = {units, n, 0, 0, limit};                                                         \
        int found;                                                                                     \
        while ((found = read_positions(size, &from, block, BLOCK)) > 0) {                              \
            if (found > count - done)                                                                  \
                return -1;                                                                             \
            for (int k = 0; k < found; k++)                                                            \
                positions[done + k] = (T)block[k];                                                     \
            done += found;                                                                             \
        }                                                                                              \
        return found == 0 && done == count && n > 0 && !ends_with_escape(size, units, n) ? 0 : -1;     \
    }

JOIN(int32_t)
JOIN(int64_t)

/* Steps are zigzag coded: 0, -1, 1, -2, ... become 0, 1, 2, 3, ... */

/* Write byte k of each zigzag coded step; return how many of these bytes are not 0. */
#define PLANE(T)                                                                                       \
    CLONES static int64_t plane_##T(const T *steps, int64_t n, int k, u8 *out)                         \
    {                                                                                                  \
        enum { BLOCK = 128, SIGN = 8 * sizeof(T) - 1 };                                                \
        int64_t filled = 0;                                                                            \
        for (int64_t i = 0; i < n; i += BLOCK) {                                                       \
            u8 bytes[BLOCK], some = 0;                                                                 \
            int length = n - i < BLOCK ? (int)(n - i) : BLOCK;                                         \
            for (int j = 0; j < length; j++) {                                                         \
                T step = steps[i + j];                                                                 \
                T zigzag = (T)((T)(step << 1) ^ (T)(0 - (step >> SIGN)));                              \
                bytes[j] = (u8)(zigzag >> 8 * k);                                                      \
            }                                                                                          \
            for (int j = 0; j < length; j++)                                                           \
                some += bytes[j] != 0;                                                                 \
            memcpy(out + i, bytes, (size_t)length);                                                    \
            filled += some;                                                                            \
        }                                                                                              \
        return filled;                                                                                 \
    }

FOR_EACH_WIDTH(PLANE)

int64_t wu_plane(int width, const void *steps, int64_t n, int k, u8 *out)
{
    return BY_WIDTH(width, plane, steps, n, k, out);
}

/* Write the steps whose zigzag code has these planes of `n` bytes each; NULL is a plane of zeros. */
#define STEPS(T)                                                                                       \
    CLONES static void steps_##T(const u8 *const *planes, int64_t n, T *out)                           \
    {                                                                                                  \
        enum { BLOCK = 256 };                                                                          \
        for (int64_t i = 0; i < n; i += BLOCK) {                                                       \
            T zigzag[BLOCK] = {0};                                                                     \
            int length = n - i < BLOCK ? (int)(n - i) : BLOCK;                                         \
            for (int k = 0; k < (int)sizeof(T); k++)                                                   \
                for (int j = 0; planes[k] && j < length; j++)                                          \
                    zigzag[j] |= (T)((T)planes[k][i + j] << 8 * k);                                    \
            for (int j = 0; j < length; j++)                                                           \
                out[i + j] = (T)((zigzag[j] >> 1) ^ (T)(0 - (zigzag[j] & 1)));                         \
        }                                                                                              \
    }

FOR_EACH_WIDTH(STEPS)

void wu_steps(int width, const u8 *const *planes, int64_t n, void *out)
{
    BY_WIDTH(width, steps, planes, n, out);
}

/* An empty module, so that tools that import every module of a package can import this one. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_kernels", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__kernels(void)
{
    return PyModule_Create(&module);
}
