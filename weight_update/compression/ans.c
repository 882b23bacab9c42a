/* The blocks of the compression "ans/1", which docs/compression.rst describes. ans.py calls the functions by
   ctypes, without the interpreter lock; ans_numpy.py is the reference.

   Nothing here allocates memory, and processors are little endian. ans_decode gets bytes from the network, and
   reads none outside of them. */

#define Py_LIMITED_API 0x030a0000
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HAS_AVX512 1
#define AVX512 __attribute__((target("avx512f,popcnt")))
#endif

typedef uint8_t u8;
typedef uint16_t u16;
typedef uint32_t u32;
typedef uint64_t u64;

enum {
    LANES = 32,      /* states that take turns, so that the processor works on several at once */
    BITS = 12,       /* frequencies add up to 1 << BITS */
    LOW = 1 << 16,   /* the least value of a state between two symbols */
    MOST = 1 + 2 * 256 + 4 * LANES /* bytes before the words */
};

int wu_version = 1; /* of the functions here; ans.py uses no other, as may be left from an earlier build */

/* Set frequencies in proportion to the counts of `n` symbols, and at least 1 for each that occurs. */
static void find_frequencies(const u8 *data, int64_t n, u32 *frequencies)
{
    u32 counts[4][256] = {{0}}; /* four, because adding twice to one number makes the processor wait */
    for (int64_t i = 0; i < n; i++)
        counts[i & 3][data[i]]++;
    u64 used = 0, seen = 0;
    for (int s = 0; s < 256; s++) {
        frequencies[s] = counts[0][s] + counts[1][s] + counts[2][s] + counts[3][s];
        used += frequencies[s] > 0;
    }
    const u64 shared = (1 << BITS) - used;
    for (int s = 0; s < 256; s++) {
        const u64 before = seen * shared / (u64)n;
        seen += frequencies[s];
        frequencies[s] = (frequencies[s] > 0) + (u32)(seen * shared / (u64)n - before);
    }
}

static u8 *write_table(const u32 *frequencies, u8 *to)
{
    int last = 255;
    while (!frequencies[last])
        last--;
    *to++ = (u8)last;
    for (int s = 0; s <= last; s++) {
        if (frequencies[s] >= 0x80)
            *to++ = (u8)(frequencies[s] | 0x80);
        *to++ = (u8)(frequencies[s] >= 0x80 ? frequencies[s] >> 7 : frequencies[s]);
    }
    return to;
}

/* Compress `n` symbols, 1 or more. Needs room for MOST + 2 n bytes; returns how many of them are the result. */
int64_t ans_encode(const u8 *data, int64_t n, u8 *out)
{
    u32 frequencies[256], starts[256], states[LANES];
    find_frequencies(data, n, frequencies);
    for (u32 s = 0, start = 0; s < 256; start += frequencies[s++])
        starts[s] = start;
    for (int k = 0; k < LANES; k++)
        states[k] = LOW;
    u8 *const end = out + MOST + 2 * n, *word = end;
    for (int64_t i = n; i-- > 0;) { /* backwards, because the reader gets the last symbol written first */
        const u32 frequency = frequencies[data[i]];
        u32 state = states[i % LANES];
        const u32 full = 0u - (state >= (u64)frequency << (32 - BITS));
        const u16 low = (u16)state;
        memcpy(word - 2, &low, 2); /* without a branch: it would often be mispredicted */
        word -= full & 2;
        state = (state & ~full) | (state >> 16 & full);
        states[i % LANES] = (state / frequency << BITS) + state % frequency + starts[data[i]];
    }
    u8 *to = write_table(frequencies, out);
    memcpy(to, states, sizeof states);
    to += sizeof states;
    memmove(to, word, (size_t)(end - word));
    return to + (end - word) - out;
}

/* An entry of the table of a reader: for each number of a symbol, (number - start) << 20 | (frequency - 1) << 8
   | symbol. Return the byte behind the table; NULL if it is not valid. */
static const u8 *read_table(const u8 *from, const u8 *end, u32 *entries)
{
    if (from == end)
        return NULL;
    const int last = *from++;
    u32 start = 0;
    for (int s = 0; s <= last; s++) {
        if (from == end)
            return NULL;
        u32 frequency = *from++;
        if (frequency >= 0x80) {
            if (from == end)
                return NULL;
            frequency = (frequency & 0x7f) | (u32)*from++ << 7;
        }
        if (frequency > (1u << BITS) - start)
            return NULL;
        for (u32 k = 0; k < frequency; k++)
            entries[start + k] = k << 20 | (frequency - 1) << 8 | (u32)s;
        start += frequency;
    }
    return start == 1 << BITS ? from : NULL;
}

static inline u32 take(u32 state, const u32 *entries, u8 *symbol)
{
    const u32 entry = entries[state & ((1 << BITS) - 1)];
    *symbol = (u8)entry;
    return ((entry >> 8 & 0xfff) + 1) * (state >> BITS) + (entry >> 20);
}

/* What is left to read and to write. */
typedef struct {
    const u8 *word, *end;
    u8 *data;
    int64_t n;
} rest;

/* Read as many whole rounds of all lanes as there are surely words for. */
static void read_rounds(const u32 *entries, u32 *states, rest *to)
{
    const u8 *word = to->word;
    for (; to->n >= LANES && to->end - word >= 2 * LANES; to->data += LANES, to->n -= LANES)
        for (int k = 0; k < LANES; k++) {
            const u32 state = take(states[k], entries, to->data + k);
            const u32 more = 0u - (state < LOW); /* without a branch: it would often be mispredicted */
            u16 low;
            memcpy(&low, word, 2);
            states[k] = (state & ~more) | ((state << 16 | low) & more);
            word += more & 2;
        }
    to->word = word;
}

#ifdef HAS_AVX512
/* The same with the instructions of AVX-512, for 16 lanes at a time. */
AVX512 static void read_rounds_fast(const u32 *entries, u32 *states, rest *to)
{
    const __m512i numbers = _mm512_set1_epi32((1 << BITS) - 1), one = _mm512_set1_epi32(1);
    const __m512i lowest = _mm512_set1_epi32(LOW);
    __m512i vectors[LANES / 16];
    memcpy(vectors, states, sizeof vectors);
    const u8 *word = to->word;
    for (; to->n >= LANES && to->end - word >= 2 * LANES; to->data += LANES, to->n -= LANES)
        for (int v = 0; v < LANES / 16; v++) {
            __m512i state = vectors[v];
            const __m512i entry = _mm512_i32gather_epi32(_mm512_and_si512(state, numbers), (const int *)entries, 4);
            _mm_storeu_si128((__m128i *)(to->data + 16 * v), _mm512_cvtepi32_epi8(entry));
            const __m512i frequency = _mm512_add_epi32(_mm512_and_si512(_mm512_srli_epi32(entry, 8), numbers), one);
            state = _mm512_mullo_epi32(frequency, _mm512_srli_epi32(state, BITS));
            state = _mm512_add_epi32(state, _mm512_srli_epi32(entry, 20));
            const __mmask16 more = _mm512_cmplt_epu32_mask(state, lowest);
            __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)word));
            words = _mm512_maskz_expand_epi32(more, words);
            vectors[v] = _mm512_mask_or_epi32(state, more, _mm512_slli_epi32(state, 16), words);
            word += 2 * __builtin_popcount(more);
        }
    memcpy(states, vectors, sizeof vectors);
    to->word = word;
}

int ans_portable = 0; /* tests set it, to take the other branch of ans_decode() */

static int has_avx512(void)
{
    return !ans_portable && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("popcnt");
}
#else
static int has_avx512(void) { return 0; }
#define read_rounds_fast read_rounds
#endif

/* Restore `n` symbols from all of `size` bytes. Return 0, or -1 if these are not valid. */
int ans_decode(const u8 *from, int64_t size, u8 *data, int64_t n)
{
    u32 entries[1 << BITS], states[LANES];
    rest to = {NULL, from + size, data, n};
    to.word = read_table(from, to.end, entries);
    if (!to.word || to.end - to.word < (int64_t)sizeof states)
        return -1;
    memcpy(states, to.word, sizeof states);
    to.word += sizeof states;
    (has_avx512() ? read_rounds_fast : read_rounds)(entries, states, &to);
    for (int64_t i = 0; i < to.n; i++) {
        u32 state = take(states[i % LANES], entries, to.data + i);
        if (state < LOW) {
            if (to.end - to.word < 2)
                return -1;
            u16 low;
            memcpy(&low, to.word, 2);
            state = state << 16 | low;
            to.word += 2;
        }
        states[i % LANES] = state;
    }
    for (int k = 0; k < LANES; k++)
        if (states[k] != LOW)
            return -1;
    return to.word == to.end ? 0 : -1;
}

/* An empty module, so that tools that import every module of a package can import this one. */
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_ans", NULL, -1, NULL, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__ans(void)
{
    return PyModule_Create(&module);
}
