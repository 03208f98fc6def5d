/* Sums over a pair of tensors, in one pass; torch_sums.py defines the same functions in torch.

Shape legend: R rows (tokens), C channels (last dim), K bins. */

#include "vectors.h"

/* A block of float64 on both sides fills half of a core's nearest cache. */
enum { HEIGHT = 8, WIDTH = 128 };

/* The sums over all elements, d = actual - expected: name and summand, in the order of `PooledSums` in sums.py. */
#define SUMS(SUM) SUM(ee, e * e) SUM(dd, d * d) SUM(de, d * e) SUM(dede, (d * e) * (d * e))
#define COUNTS(COUNT) COUNT(num_nan, ) COUNT(num_inf, ) COUNT(num_misrounded, )

#define POSITION(name, summand) SUM_##name,
enum { SUMS(POSITION) NUM_SUMS };

#define NAME(name, summand) #name " "
const char *names_of_sums(void) { return SUMS(NAME) COUNTS(NAME); }

/* Round to float16, ties to even, and widen again. */
static double round_to_float16(double wide) {
    float value = (float)wide, size = fabsf(value);
    if (!(size < 65520.0f)) return size >= 65520.0f ? copysign(INFINITE, wide) : wide;
    /* 0.5 units of the last place of the result, from its exponent, which is -14 or more. */
    float unit = float_of_bits((bits_of_float(size < 0x1p-14f ? 0x1p-14f : size) & 0x7f800000));
    float shift = unit * 0x1.8p13f;
    return copysign((double)((size + shift) - shift), wide);
}

static double round_to(double wide, int32_t dtype) {
    if (dtype == FLOAT64) return wide;
    if (dtype == FLOAT16) return round_to_float16(wide);
    float value = (float)wide;
    if (dtype == FLOAT32 || value != value) return value;
    uint32_t bits = bits_of_float(value);
    return float_of_bits((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
}

/* One element of a pair. Masks contain the lowest number of their dtype, which stands for infinity. */
typedef struct {
    double actual, expected, difference;
} Element;

static const double MASKED_SIZE = 0x1p120;

static inline Element element_of(double actual, double expected, int32_t dtype) {
    if (fabs(expected) >= MASKED_SIZE) {
        expected = copysign(INFINITE, expected);
        if (fabs(actual) >= LARGE[dtype]) actual = copysign(INFINITE, actual);
    }
    return (Element){actual, expected, actual - expected};
}

#define FIELD(name, summand) int64_t name;
typedef struct {
    COUNTS(FIELD)
    int64_t worst_row, worst_channel;
    double worst_difference, worst_actual, worst_expected;
} Found;

/* A block of a pair in float64. */
typedef struct {
    double actual[HEIGHT][WIDTH], expected[HEIGHT][WIDTH];
    int64_t first_row, first_channel, height, width;
    int32_t dtype;
} Block;

static void note_worst(const Block *block, int64_t row, Found *found) {
    for (int64_t c = 0; c < block->width; c++) {
        Element one = element_of(block->actual[row][c], block->expected[row][c], block->dtype);
        double size = fabs(one.difference);
        if (!isfinite(size) || !(size > found->worst_difference)) continue;
        found->worst_row = block->first_row + row;
        found->worst_channel = block->first_channel + c;
        found->worst_difference = size;
        found->worst_actual = one.actual;
        found->worst_expected = one.expected;
    }
}

/* Replace values that are not finite by zeros in a row that has any, or a value of a mask.

Returns 1 if one side has such a value where the other has another. */
static int clear_row(Block *block, int64_t row, Found *found) {
    int is_hit = 0;
    for (int64_t c = 0; c < block->width; c++) {
        Element one = element_of(block->actual[row][c], block->expected[row][c], block->dtype);
        double a = one.actual, e = one.expected;
        if (!isfinite(a) && isfinite(e)) {
            found->num_nan += isnan(a) != 0;
            found->num_inf += isinf(a) != 0;
        }
        int is_same = a == e || (isnan(a) && isnan(e));
        is_hit |= !isfinite(one.difference) && !is_same;
        if (!isfinite(e)) e = 0.0;
        block->actual[row][c] = isfinite(one.difference) ? a : e;
        block->expected[row][c] = e;
    }
    return is_hit;
}

typedef struct {
    double sums[NUM_SUMS];
    /* The largest d d. */
    double largest;
} RowSums;

/* Return 1 if a difference may be larger than the worst. Its square may have been rounded down; where all agree,
the first element is the worst. */
static inline int may_hold_worst(double largest_square, double worst) {
    return largest_square > 0 ? sqrt(largest_square) >= worst : worst < 0;
}

/* Widen a row of a pair to float64 into a block, fill it with zeros up to a multiple of LANES, and sum it. */
ALWAYS_INLINE RowSums sum_row_as(
    Block *block, int64_t row, const char *actual, int32_t actual_dtype, const char *expected, int32_t expected_dtype
) {
#define START(name, summand) Vector name = {0};
#define ADD(name, summand) name += summand;
#define FINISH(name, summand) add_lanes(name),
    SUMS(START)
    Vector most = {0};
    int64_t actual_size = SIZES[actual_dtype], expected_size = SIZES[expected_dtype], width = block->width;
    char rest[2][LANES * 8] = {0};
    for (int64_t c = 0; c < width; c += LANES) {
        if (c + LANES > width) {
            actual = memcpy(rest[0], actual, (width - c) * actual_size);
            expected = memcpy(rest[1], expected, (width - c) * expected_size);
        } else {
            __builtin_prefetch(actual + WIDTH * actual_size);
            __builtin_prefetch(expected + WIDTH * expected_size);
        }
        Vector a = widen_lanes(actual, actual_dtype), e = widen_lanes(expected, expected_dtype);
        store(&block->actual[row][c], a);
        store(&block->expected[row][c], e);
        Vector d = a - e, d_d = d * d;
        SUMS(ADD)
        Mask is_more = (Mask)(d_d > most);
        most = (Vector)(((Mask)d_d & is_more) | ((Mask)most & ~is_more));
        actual += LANES * actual_size;
        expected += LANES * expected_size;
    }
    RowSums result = {{SUMS(FINISH)}, 0.0};
    for (int lane = 0; lane < LANES; lane++)
        if (most[lane] > result.largest) result.largest = most[lane];
    return result;
}

#define FOR_EXPECTED(A) \
    switch (expected_dtype) { \
    case FLOAT64: return sum_row_as(block, row, actual, A, expected, FLOAT64); \
    case FLOAT32: return sum_row_as(block, row, actual, A, expected, FLOAT32); \
    case BFLOAT16: return sum_row_as(block, row, actual, A, expected, BFLOAT16); \
    default: return sum_row_as(block, row, actual, A, expected, FLOAT16); \
    }

static RowSums sum_row(
    Block *block, int64_t row, const char *actual, int32_t actual_dtype, const char *expected, int32_t expected_dtype
) {
    switch (actual_dtype) {
    case FLOAT64: FOR_EXPECTED(FLOAT64)
    case FLOAT32: FOR_EXPECTED(FLOAT32)
    case BFLOAT16: FOR_EXPECTED(BFLOAT16)
    default: FOR_EXPECTED(FLOAT16)
    }
}

/* Add a block to the sums over its rows of d, d e, e e, d d, e; each lies `apart` after the one before. */
static void sum_channels(const Block *block, double *channels, int64_t apart) {
    for (int64_t c = 0; c < block->width; c += LANES) {
        Vector sums[5] = {0};
        for (int64_t row = 0; row < block->height; row++) {
            Vector e = load(&block->expected[row][c]), d = load(&block->actual[row][c]) - e;
            sums[0] += d;
            sums[1] += d * e;
            sums[2] += e * e;
            sums[3] += d * d;
            sums[4] += e;
        }
        for (int k = 0; k < 5; k++) {
            double *into = channels + k * apart + c;
            if (c + LANES <= block->width) store(into, load(into) + sums[k]);
            else for (int lane = 0; c + lane < block->width; lane++) into[lane] += sums[k][lane];
        }
    }
}

static int64_t count_misrounded(const Block *block, int64_t row) {
    int64_t count = 0;
    for (int64_t c = 0; c < block->width; c++) {
        Element one = element_of(block->actual[row][c], block->expected[row][c], block->dtype);
        count += round_to(one.expected, block->dtype) != one.actual;
    }
    return count;
}

/* Add rows `first` to `last` of a pair.

rows: (NUM_SUMS, R), over channels; d d is nan in a row with a value that is not finite on one side.
channels: (5, C), to which the sums over rows of d, d e, e e, d d, e are added; or NULL.
found: its worst difference starts at -1. */
void sum_pair(
    Matrix actual, Matrix expected, int64_t num_rows, int64_t num_channels, int64_t first, int64_t last,
    int32_t counts_misrounded, double *rows, double *channels, Found *found
) {
    Block block = {.dtype = actual.dtype};
    for (int64_t at = first; at < last; at += HEIGHT) {
        block.first_row = at;
        block.height = smaller(HEIGHT, last - at);
        for (int64_t channel = 0; channel < num_channels; channel += WIDTH) {
            block.first_channel = channel;
            block.width = smaller(WIDTH, num_channels - channel);
            for (int64_t row = 0; row < block.height; row++) {
                RowSums of_row = sum_row(
                    &block, row, row_of(&actual, at + row, channel), actual.dtype,
                    row_of(&expected, at + row, channel), expected.dtype
                );
                if (counts_misrounded) found->num_misrounded += count_misrounded(&block, row);
                int is_hit = 0;
                /* A row with a NaN, an infinity or a value of a mask has one of these sums. */
                if (!(of_row.sums[SUM_ee] < MASKED_SIZE * MASKED_SIZE && of_row.sums[SUM_dd] < INFINITE)) {
                    note_worst(&block, row, found);
                    is_hit = clear_row(&block, row, found);
                    of_row = sum_row(
                        &block, row, (char *)block.actual[row], FLOAT64, (char *)block.expected[row], FLOAT64
                    );
                } else if (may_hold_worst(of_row.largest, found->worst_difference)) {
                    note_worst(&block, row, found);
                }
                for (int k = 0; k < NUM_SUMS; k++) rows[k * num_rows + at + row] += of_row.sums[k];
                if (is_hit) rows[SUM_dd * num_rows + at + row] = NAN;
            }
            if (channels) sum_channels(&block, channels + channel, num_channels);
        }
    }
}

/* How a call is sampled and judged; see metrics.py and sums.py. */
typedef struct {
    int64_t binned_elements, largest_stride, fewest_in_row, reach;
    double row_floor, cells_per_unit;
    const int32_t *bin_of_cell;
    int32_t keeps_systematic, rounds;
} Plan;

/* Add every `stride`th element that is finite to its bin.

unit: root mean square of the expected values, in which all sums are.
bins: (K, 6), counts and sums of d, d d, e, and of d, d d for d = actual - rounded e. */
static void sum_bins(
    const Matrix *actual, const Matrix *expected, int64_t num_rows, int64_t num_channels, const Plan *plan,
    double unit, double *bins
) {
    int64_t stride = (num_rows * num_channels + plan->binned_elements - 1) / plan->binned_elements;
    int64_t channel = 0;
    double cells = plan->cells_per_unit / unit, inverse = 1 / unit, reach = plan->reach;
    /* An even stride would sample only some of the channels. */
    stride = smaller(stride, plan->largest_stride) | 1;
    for (int64_t row = 0; row < num_rows; row++, channel -= num_channels) {
        const char *a_row = row_of(actual, row, 0), *e_row = row_of(expected, row, 0);
        for (; channel < num_channels; channel += stride) {
            double a = value_at(a_row, actual->dtype, channel), e = value_at(e_row, expected->dtype, channel);
            Element one = element_of(a, e, actual->dtype);
            if (!isfinite(one.difference)) continue;
            double cell = ceil(one.expected * cells), d = one.difference * inverse;
            cell = cell < -reach ? -reach : cell > reach ? reach : cell;
            double *bin = bins + 6 * plan->bin_of_cell[(int64_t)cell + plan->reach];
            bin[0] += 1;
            bin[1] += d;
            bin[2] += d * d;
            bin[3] += one.expected * inverse;
            if (plan->rounds) {
                double more = (one.actual - round_to(one.expected, actual->dtype)) * inverse;
                bin[4] += more;
                bin[5] += more * more;
            }
        }
    }
}

/* Add up the rows of a pair, sum its bins, and replace the first three sums of each row by the norms of e and d
and the scale: the root mean square norm of e.

slopes: number of rows with a slope; sums of their slopes, squared slopes and variances.
totals: (NUM_SUMS,), over all rows. */
void finish_pair(
    Matrix actual, Matrix expected, int64_t num_rows, int64_t num_channels, const Plan *plan, double *rows,
    double *bins, double *slopes, double *totals
) {
    double *ee = rows + SUM_ee * num_rows, *dd = rows + SUM_dd * num_rows;
    double *de = rows + SUM_de * num_rows, *dede = rows + SUM_dede * num_rows;
    for (int k = 0; k < NUM_SUMS; k++)
        for (int64_t row = 0; row < num_rows; row++) {
            double sum = rows[k * num_rows + row];
            totals[k] += k == SUM_dd && isnan(sum) ? 0.0 : sum;
        }
    double scale = sqrt(totals[SUM_ee] / num_rows), floor = plan->row_floor * scale;
    double unit = scale / sqrt((double)num_channels);
    if (plan->keeps_systematic && unit > 0 && isfinite(unit))
        sum_bins(&actual, &expected, num_rows, num_channels, plan, unit, bins);
    for (int64_t row = 0; row < num_rows; row++) {
        int is_usable = plan->keeps_systematic && num_channels >= plan->fewest_in_row;
        if (is_usable && ee[row] > floor * floor && isfinite(dd[row])) {
            double slope = de[row] / ee[row];
            slopes[0] += 1;
            slopes[1] += slope;
            slopes[2] += slope * slope;
            slopes[3] += dede[row] / (ee[row] * ee[row]);
        }
        ee[row] = sqrt(ee[row]);
        dd[row] = sqrt(dd[row]);
        de[row] = scale;
    }
}
