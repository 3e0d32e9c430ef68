/* The inner loops of quant8 and of the checksum, bit for bit what Python computes. Built by native.py; never needed. */
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

/* Sums on the exact grid, as whole numbers of grid steps.
   How many bytes hold every one of them: 5, 6 or 7; 0 if one is not on the grid, not finite, or too large. */
int st_width(const double *numbers, size_t count, double steps_per_one) {
    double largest = 0.0;
    int is_off = 0;
    for (size_t i = 0; i < count; i++) {
        double steps = numbers[i] * steps_per_one;
        double size = steps < 0.0 ? -steps : steps;
        is_off |= !(size <= 9007199254740992.0);
        size = size <= 9007199254740992.0 ? size : 0.0;
        is_off |= size != (double)(int64_t)size;
        largest = size > largest ? size : largest;
    }
    if (is_off) return 0;
    return largest < 549755813888.0 ? 5 : largest < 140737488355328.0 ? 6 : 7;
}

/* Eight bytes are moved for each number but the last: the next one covers, or the shift drops, what is too much. */
void st_pack(const double *numbers, size_t count, double steps_per_one, size_t width, uint8_t *out) {
    if (count == 0) return;
    for (size_t i = 0; i + 1 < count; i++) {
        int64_t steps = (int64_t)(numbers[i] * steps_per_one);
        memcpy(out + i * width, &steps, 8);
    }
    int64_t last = (int64_t)(numbers[count - 1] * steps_per_one);
    memcpy(out + (count - 1) * width, &last, width);
}

void st_unpack(const uint8_t *in, size_t count, double step, size_t width, double *numbers) {
    int unused = 64 - 8 * (int)width;
    if (count == 0) return;
    for (size_t i = 0; i + 1 < count; i++) {
        uint64_t bits;
        memcpy(&bits, in + i * width, 8);
        numbers[i] = (double)((int64_t)(bits << unused) >> unused) * step;
    }
    uint64_t last = 0;
    memcpy(&last, in + (count - 1) * width, width);
    numbers[count - 1] = (double)((int64_t)(last << unused) >> unused) * step;
}
