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
