/* Vectors of float64, and the tensors that are read into them.

Every sum is taken in LANES partial sums, whose order the source fixes. So results are equal, bit for bit, for any
width of a processor's vectors and any number of threads. Processors that fuse a product and a sum round once less. */

#pragma once

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { LANES = 8 };

typedef double Vector __attribute__((vector_size(LANES * 8)));
typedef int64_t Mask __attribute__((vector_size(LANES * 8)));
typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

enum { FLOAT64, FLOAT32, BFLOAT16, FLOAT16 };

#define ALWAYS_INLINE static inline __attribute__((always_inline))

/* A matrix (R, C) whose rows lie `stride` elements apart. */
typedef struct {
    const char *data;
    int64_t stride;
    int32_t dtype;
} Matrix;

static const int64_t SIZES[] = {8, 4, 2, 2};
/* Half of the largest number. */
static const double LARGE[] = {DBL_MAX / 2, FLT_MAX / 2, 0x1.FEp127 / 2, 65504.0 / 2};

static const double INFINITE = __builtin_inf();

static inline const char *row_of(const Matrix *matrix, int64_t row, int64_t channel) {
    return matrix->data + (row * matrix->stride + channel) * SIZES[matrix->dtype];
}

static inline Vector load(const void *at) {
    Vector value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void store(double *at, Vector value) { memcpy(at, &value, sizeof value); }

static inline Vector choose(Mask mask, Vector one, Vector other) {
    return (Vector)((mask & (Mask)one) | (~mask & (Mask)other));
}

static const Mask COUNTED = {0, 1, 2, 3, 4, 5, 6, 7};

static inline double add_lanes(Vector v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

static inline float float_of_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of_float(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline Floats widen_float16(Halves halves) {
    Words bits = __builtin_convertvector(halves, Words), size = bits & 0x7fff;
    /* Not by a product of subnormal numbers: a processor may be set to read them as zeros. */
    Words subnormal = (Words)(__builtin_convertvector((Ints)size, Floats) * 0x1p-24f);
    Words is_subnormal = (Words)(size < 0x0400), is_special = (Words)(size >= 0x7c00);
    Words normal = ((size << 13) + (112 << 23)) | (is_special & 0x7f800000);
    return (Floats)((is_subnormal & subnormal) | (~is_subnormal & normal) | (bits & 0x8000) << 16);
}

/* Widen LANES values of any dtype but float64 to float32. */
ALWAYS_INLINE Floats widen_to_floats(const char *source, int32_t dtype) {
    Floats value;
    Halves halves;
    if (dtype == FLOAT32) {
        memcpy(&value, source, sizeof value);
        return value;
    }
    memcpy(&halves, source, sizeof halves);
    return dtype == FLOAT16 ? widen_float16(halves) : (Floats)(__builtin_convertvector(halves, Words) << 16);
}

ALWAYS_INLINE Vector widen_lanes(const char *source, int32_t dtype) {
    if (dtype == FLOAT64) return load(source);
    return __builtin_convertvector(widen_to_floats(source, dtype), Vector);
}

static inline int64_t smaller(int64_t one, int64_t other) { return one < other ? one : other; }

ALWAYS_INLINE void widen_as(const char *from, int32_t dtype, int64_t count, double *to) {
    int64_t at = 0, size = SIZES[dtype];
    for (; at + LANES <= count; at += LANES) store(to + at, widen_lanes(from + at * size, dtype));
    if (at < count) {
        char rest[LANES * 8] = {0};
        memcpy(rest, from + at * size, (count - at) * size);
        store(to + at, widen_lanes(rest, dtype));
    }
}

/* Widen `count` values to float64, and fill with zeros up to a multiple of LANES. */
static inline void widen(const char *from, int32_t dtype, int64_t count, double *to) {
    switch (dtype) {
    case FLOAT64: widen_as(from, FLOAT64, count, to); break;
    case FLOAT32: widen_as(from, FLOAT32, count, to); break;
    case BFLOAT16: widen_as(from, BFLOAT16, count, to); break;
    default: widen_as(from, FLOAT16, count, to);
    }
}

static inline double value_at(const char *from, int32_t dtype, int64_t at) {
    double value;
    float narrow;
    uint16_t half;
    switch (dtype) {
    case FLOAT64: memcpy(&value, from + 8 * at, 8); return value;
    case FLOAT32: memcpy(&narrow, from + 4 * at, 4); return narrow;
    case BFLOAT16: memcpy(&half, from + 2 * at, 2); return float_of_bits((uint32_t)half << 16);
    default: memcpy(&half, from + 2 * at, 2); return widen_float16((Halves){half})[0];
    }
}
