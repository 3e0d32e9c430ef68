/* The inner loops of quant8, checksums, exact sums and shares, bit for bit what Python computes. Never needed. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define LEVELS 127.0f
#define ROUNDER 12582912.0f /* 1.5 * 2^23: adding it rounds halves to even, and the sum's lowest bits are the number */
#define SMALL_SCALE 0x1p-100f
#define LIFT 0x1p64f

static float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int8_t rounded_to_byte(float value) {
    float sum = value + ROUNDER;
    uint32_t bits;
    memcpy(&bits, &sum, sizeof bits);
    return (int8_t)(uint8_t)bits;
}

/* Returns 0, or 1 if a number is NaN or infinite: then the output means nothing. */
int st_quantize8(const float *numbers, size_t num_groups, size_t group, uint16_t *scales, int8_t *codes) {
    for (size_t g = 0; g < num_groups; g++) {
        const float *in = numbers + g * group;
        int8_t *out = codes + g * group;
        int32_t largest = 0;
        for (size_t i = 0; i < group; i++) {
            int32_t bits;
            memcpy(&bits, in + i, sizeof bits);
            bits &= 0x7FFFFFFF;
            largest = bits > largest ? bits : largest;
        }
        if (largest >= 0x7F800000) return 1;
        uint32_t rounded = ((uint32_t)largest + 0xFFFFu) & ~0xFFFFu;
        if (rounded > 0x7F7F0000u) rounded = 0x7F7F0000u;
        scales[g] = (uint16_t)(rounded >> 16);
        float scale = from_bits(rounded);
        if (scale == 0.0f) {
            memset(out, 0, group);
            continue;
        }
        float lift = scale < SMALL_SCALE ? LIFT : 1.0f;
        float factor = LEVELS / (scale * lift);
        if (lift == 1.0f) {
            for (size_t i = 0; i < group; i++) {
                float scaled = in[i] * factor;
                out[i] = rounded_to_byte(scaled);
            }
        } else {
            for (size_t i = 0; i < group; i++) {
                float scaled = (in[i] * lift) * factor;
                out[i] = rounded_to_byte(scaled);
            }
        }
    }
    return 0;
}

void st_dequantize8(const int8_t *codes, size_t num_groups, size_t group, const uint16_t *scales, float *numbers) {
    for (size_t g = 0; g < num_groups; g++) {
        float step = from_bits((uint32_t)scales[g] << 16) / LEVELS;
        const int8_t *in = codes + g * group;
        float *out = numbers + g * group;
        for (size_t i = 0; i < group; i++) out[i] = (float)in[i] * step;
    }
}

/* Sums of the rows and of the columns of a matrix of 64-bit words; `columns` are added to. */
void st_sums(const uint64_t *words, size_t num_rows, size_t num_columns, uint64_t *rows, uint64_t *columns) {
    for (size_t r = 0; r < num_rows; r++) {
        const uint64_t *in = words + r * num_columns;
        uint64_t total = 0;
        for (size_t c = 0; c < num_columns; c++) {
            total += in[c];
            columns[c] += in[c];
        }
        rows[r] = total;
    }
}

/* Shares of exact sums: whole numbers of grid steps, little-endian, in 5, 6 or 7 bytes each. */

#define BLOCK 1024
#define MAX_STEPS 9007199254740992.0 /* 2^53: every whole number up to it is a double */

static int width_of(double largest) {
    return largest < 549755813888.0 ? 5 : largest < 140737488355328.0 ? 6 : 7;
}

/* Writes `width` bytes for each number and returns how many the largest needs. If that is more than `width`, or 0
   (a number is not on the grid, not finite, or too large), it has stopped early and the output means nothing.
   Eight bytes are moved for each number but the last: the next one covers what is too much. */
int st_pack(const double *numbers, size_t count, double steps_per_one, size_t width, uint8_t *out) {
    int needed = 5;
    for (size_t start = 0; start < count; start += BLOCK) {
        size_t length = count - start < BLOCK ? count - start : BLOCK;
        int64_t steps[BLOCK];
        double largest = 0.0;
        int is_off = 0;
        for (size_t i = 0; i < length; i++) {
            double exact = numbers[start + i] * steps_per_one;
            double size = exact < 0.0 ? -exact : exact;
            is_off |= !(size <= MAX_STEPS);
            exact = size <= MAX_STEPS ? exact : 0.0;
            steps[i] = (int64_t)exact;
            is_off |= (double)steps[i] != exact;
            largest = size > largest ? size : largest;
        }
        if (is_off) return 0;
        int here = width_of(largest);
        needed = here > needed ? here : needed;
        if (needed > (int)width) return needed;
        uint8_t *to = out + start * width;
        size_t whole = start + length < count ? length : length - 1;
        for (size_t i = 0; i < whole; i++) memcpy(to + i * width, steps + i, 8);
        if (whole < length) memcpy(to + whole * width, steps + whole, width);
    }
    return needed;
}

static inline int64_t steps_at(const uint8_t *in, size_t width) {
    uint64_t bits;
    int unused = 64 - 8 * (int)width;
    memcpy(&bits, in, 8);
    return (int64_t)(bits << unused) >> unused;
}

static inline void add_block(const uint8_t *in, size_t length, size_t width, int64_t *total) {
    for (size_t i = 0; i < length; i++) total[i] += steps_at(in + i * width, width);
}

/* Add numbers, each rounded to the grid on which `rounder` is 1.5 times a power of two, ties to even. */
void st_put_floats(const float *in, size_t count, double rounder, double sign, double *total) {
    for (size_t i = 0; i < count; i++) total[i] += sign * (((double)in[i] + rounder) - rounder);
}

/* The same of bf16 numbers. */
void st_put_halves(const uint16_t *in, size_t count, double rounder, double sign, double *total) {
    for (size_t i = 0; i < count; i++)
        total[i] += sign * (((double)from_bits((uint32_t)in[i] << 16) + rounder) - rounder);
}

/* Adds a share of `count` numbers to `total`, in steps. A share of width 8 is doubles. Returns 0; 1 if a double is not on
   the grid: then nothing is added. */
int st_add(const uint8_t *in, size_t width, size_t count, double step, int64_t *total) {
    if (count == 0) return 0;
    if (width == 8) {
        double steps_per_one = 1.0 / step;
        int is_off = 0;
        for (size_t i = 0; i < count; i++) {
            double number;
            memcpy(&number, in + 8 * i, 8);
            number *= steps_per_one;
            int fits = number <= MAX_STEPS && number >= -MAX_STEPS;
            number = fits ? number : 0.0;
            is_off |= !fits | ((double)(int64_t)number != number);
        }
        if (is_off) return 1;
        for (size_t i = 0; i < count; i++) {
            double number;
            memcpy(&number, in + 8 * i, 8);
            total[i] += (int64_t)(number * steps_per_one);
        }
        return 0;
    }
    size_t whole = count - 1; /* the last one has no byte behind it */
    if (width == 5) add_block(in, whole, 5, total);
    else if (width == 6) add_block(in, whole, 6, total);
    else add_block(in, whole, 7, total);
    uint8_t last[8] = {0};
    memcpy(last, in + whole * width, width);
    total[whole] += steps_at(last, width);
    return 0;
}

/* Rounds a total to fp32. Returns 1 if a number is larger than 2^53 steps. */
int st_round(const int64_t *total, size_t count, double step, float *out) {
    int is_over = 0;
    for (size_t i = 0; i < count; i++) {
        is_over |= total[i] > (int64_t)MAX_STEPS || total[i] < -(int64_t)MAX_STEPS;
        out[i] = (float)((double)total[i] * step);
    }
    return is_over;
}

/* The crc32 of zlib, 64 bytes at a time where the processor multiplies without carry; `count` is a multiple of 16 and
   at least 64. A number folded over n bits is multiplied by x^n modulo the polynomial; what is left of everything is
   16 bytes with the same remainder, which are divided bit by bit. Returns 0 where it is not built. */
#ifdef __PCLMUL__
#include <immintrin.h>

static inline __m128i folded(__m128i value, __m128i powers) {
    return _mm_xor_si128(_mm_clmulepi64_si128(value, powers, 0x00), _mm_clmulepi64_si128(value, powers, 0x11));
}

int st_crc32(const uint8_t *bytes, size_t count, uint32_t *crc) {
    const __m128i *in = (const __m128i *)bytes;
    const __m128i by_512 = _mm_set_epi64x(0x1c6e41596, 0x154442bd4);
    const __m128i by_128 = _mm_set_epi64x(0x0ccaa009e, 0x1751997d0);
    __m128i lanes[4];
    for (int i = 0; i < 4; i++) lanes[i] = _mm_loadu_si128(in + i);
    lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)~*crc));
    in += 4;
    size_t left = count / 16 - 4;
    for (; left >= 4; left -= 4, in += 4)
        for (int i = 0; i < 4; i++) lanes[i] = _mm_xor_si128(folded(lanes[i], by_512), _mm_loadu_si128(in + i));
    __m128i rest = lanes[0];
    for (int i = 1; i < 4; i++) rest = _mm_xor_si128(folded(rest, by_128), lanes[i]);
    for (; left; left--, in++) rest = _mm_xor_si128(folded(rest, by_128), _mm_loadu_si128(in));
    uint8_t last[16];
    memcpy(last, &rest, sizeof last);
    uint32_t remainder = 0;
    for (size_t i = 0; i < sizeof last; i++) {
        remainder ^= last[i];
        for (int bit = 0; bit < 8; bit++) remainder = (remainder >> 1) ^ (0xEDB88320u & -(remainder & 1u));
    }
    *crc = ~remainder;
    return 1;
}
#else
int st_crc32(const uint8_t *bytes, size_t count, uint32_t *crc) {
    (void)bytes, (void)count, (void)crc;
    return 0;
}
#endif
