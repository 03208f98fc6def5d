/* Statistics of a tensor, in one pass over it. Shape legend: R rows, C channels. */

#include "vectors.h"

typedef struct {
    double low, high, sum, squares, projection;
    int64_t num_nan, num_inf;
} Statistics;

/* Sums of each lane; `high` is negated. */
typedef struct {
    Vector low, high, sum, squares, projected;
} Lanes;

/* Written so that compilers take the processor's instruction for it. */
ALWAYS_INLINE Vector least(Vector one, Vector other) {
    Vector result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = one[lane] < other[lane] ? one[lane] : other[lane];
    return result;
}

ALWAYS_INLINE void add_values(Lanes *lanes, Vector v, Vector factors, Mask is_there) {
    Vector outside = {0};
    outside += INFINITE;
    lanes->low = least(choose(is_there, v, outside), lanes->low);
    lanes->high = least(choose(is_there, -v, outside), lanes->high);
    lanes->sum += v;
    lanes->squares += v * v;
    lanes->projected += v * factors;
}

/* Add a row to two sets of lanes in turns, which do not wait for each other. */
ALWAYS_INLINE void add_row(Lanes *lanes, const char *from, int32_t dtype, int64_t channels, const double *factors) {
    const Mask all = COUNTED < LANES;
    int64_t at = 0, size = SIZES[dtype];
    for (; at + 2 * LANES <= channels; at += 2 * LANES)
        for (int set = 0; set < 2; set++) {
            int64_t there = at + set * LANES;
            add_values(&lanes[set], widen_lanes(from + there * size, dtype), load(factors + there), all);
        }
    for (; at < channels; at += LANES) {
        char rest[LANES * 8] = {0};
        double last[LANES] = {0};
        int64_t count = smaller(LANES, channels - at);
        memcpy(rest, from + at * size, count * size);
        memcpy(last, factors + at, count * 8);
        add_values(lanes, widen_lanes(rest, dtype), load(last), COUNTED < count);
    }
}

ALWAYS_INLINE void add_rows(
    Statistics *found, const Matrix *values, int32_t dtype, int64_t channels, int64_t first, int64_t last,
    const double *row_factors, const double *channel_factors
) {
    Lanes lanes[2] = {0};
    for (int set = 0; set < 2; set++) {
        lanes[set].low += INFINITE;
        lanes[set].high += INFINITE;
    }
    for (int64_t row = first; row < last; row++) {
        for (int set = 0; set < 2; set++) lanes[set].projected = (Vector){0};
        add_row(lanes, row_of(values, row, 0), dtype, channels, channel_factors);
        found->projection += row_factors[row] * add_lanes(lanes[0].projected + lanes[1].projected);
    }
    Vector low = least(lanes[0].low, lanes[1].low), high = least(lanes[0].high, lanes[1].high);
    for (int lane = 0; lane < LANES; lane++) {
        found->low = low[lane] < found->low ? low[lane] : found->low;
        found->high = -high[lane] > found->high ? -high[lane] : found->high;
    }
    found->sum += add_lanes(lanes[0].sum + lanes[1].sum);
    found->squares += add_lanes(lanes[0].squares + lanes[1].squares);
}

static void count_not_finite(Statistics *found, const Matrix *values, int64_t channels, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
        const char *from = row_of(values, row, 0);
        for (int64_t at = 0; at < channels; at++) {
            double value = value_at(from, values->dtype, at);
            found->num_nan += isnan(value) != 0;
            found->num_inf += isinf(value) != 0;
        }
    }
}

/* Add the statistics of some rows. row_factors: (R,), channel_factors: (C,), of the projection. */
void add_statistics(
    Matrix values, int64_t channels, int64_t first, int64_t last, const double *row_factors,
    const double *channel_factors, Statistics *found
) {
    switch (values.dtype) {
#define ADD(DTYPE) add_rows(found, &values, DTYPE, channels, first, last, row_factors, channel_factors)
    case FLOAT64: ADD(FLOAT64); break;
    case FLOAT32: ADD(FLOAT32); break;
    case BFLOAT16: ADD(BFLOAT16); break;
    default: ADD(FLOAT16);
    }
    if (!isfinite(found->squares)) count_not_finite(found, &values, channels, first, last);
}
