/* Sums over the next-token distributions of two runs, token by token, and the largest logits.

P is the softmax of the expected logits e; d = actual - expected. Shape legend: T tokens, V vocabulary. */

#include "vectors.h"

/* Logits of one token that are widened at once: both sides fit into a core's nearest cache. */
enum { CHUNK = 512, BATCH = 64, NUM_SUMS = 11, MOST_TERMS = 32 };

/* Changes of logits up to this size are summed as a series, whose rest is at most SERIES_REST of its sum. */
static const double LARGEST_IN_SERIES = 4.0, SERIES_REST = 1e-7;

/* Compute e**x for x <= 0 with a relative error of 2**-22; 0 below e**-87.

Source of the polynomial: Moshier, Cephes Math Library 2.8, expf. */
static inline Vector exp_of(Vector wide) {
    Floats x = __builtin_convertvector(wide, Floats);
    Words is_tiny = ~(Words)(x >= -87.0f);
    x = (Floats)((Words)x & ~is_tiny);
    Ints power = __builtin_convertvector(1.44269504088896341f * x - 0.5f, Ints);
    Floats whole = __builtin_convertvector(power, Floats);
    x = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    Floats sum = 1.9875691500e-4f * x + 1.3981999507e-3f;
    sum = sum * x + 8.3334519073e-3f;
    sum = sum * x + 4.1665795894e-2f;
    sum = sum * x + 1.6666665459e-1f;
    sum = sum * x + 5.0000001201e-1f;
    sum = sum * (x * x) + x + 1.0f;
    Words result = (Words)sum + ((Words)power << 23);
    return __builtin_convertvector((Floats)(result & ~is_tiny), Vector);
}

static inline void store_floats(float *at, Vector value) {
    Floats narrow = __builtin_convertvector(value, Floats);
    memcpy(at, &narrow, sizeof narrow);
}

static inline Vector load_floats(const float *at) {
    Floats narrow;
    memcpy(&narrow, at, sizeof narrow);
    return __builtin_convertvector(narrow, Vector);
}

typedef struct {
    Vector d, dd, ee, de, e, low, high, weight, weighted;
} Lanes;

/* Add a chunk, and keep its weights and differences for the second pass. */
static void add_chunk(
    Lanes *sums, const double *actual, const double *expected, int64_t count, double largest,
    float *weights, float *differences
) {
    for (int64_t at = 0; at < count; at += LANES) {
        Mask is_there = COUNTED < count - at;
        Vector e = load(expected + at), d = load(actual + at) - e;
        Vector weight = (Vector)((Mask)exp_of(e - largest) & is_there);
        store_floats(weights + at, weight);
        store_floats(differences + at, d);
        sums->d += d;
        sums->dd += d * d;
        sums->ee += e * e;
        sums->de += d * e;
        sums->e += e;
        sums->low = choose(is_there & (d < sums->low), d, sums->low);
        sums->high = choose(is_there & (d > sums->high), d, sums->high);
        sums->weight += weight;
        sums->weighted += weight * d;
    }
}

/* Return the number of terms of the series of e**c - 1 - c for changes of this size; 0 if they are too many. */
static int count_terms(double change) {
    int terms = 1;
    if (!(change <= LARGEST_IN_SERIES)) return 0;
    /* The next term over the first one, c**2 / 2. */
    for (double rest = change / 3; rest > SERIES_REST; rest *= change / (terms + 2)) terms++;
    return terms;
}

/* Compute the sums of each token, (T, 11) in float64:

d, d d, e e, d e, e; the lowest and highest d; the squares of d over its mean; E[d] under P; and, with
c = d - E[d], E[c] and E[e**c - 1 - c], which is nan if a change is larger than LARGEST_IN_SERIES.
largest: the largest expected logit of each token, (T,). memory: for 2 (V + LANES) numbers. */
void sum_tokens(
    Matrix actual, Matrix expected, int64_t vocabulary, int64_t first, int64_t last, const double *largest,
    float *memory, double *results
) {
    double a[CHUNK], e[CHUNK], inverse[MOST_TERMS + 2];
    float *weights = memory, *differences = memory + vocabulary + LANES;
    for (int divisor = 1; divisor < MOST_TERMS + 2; divisor++) inverse[divisor] = 1.0 / divisor;
    for (int64_t token = first; token < last; token++) {
        Lanes sums = {0};
        sums.low += INFINITE;
        sums.high += -INFINITE;
        for (int64_t at = 0; at < vocabulary; at += CHUNK) {
            int64_t count = smaller(CHUNK, vocabulary - at);
            widen(row_of(&actual, token, at), actual.dtype, count, a);
            widen(row_of(&expected, token, at), expected.dtype, count, e);
            add_chunk(&sums, a, e, count, largest[token], weights + at, differences + at);
        }
        double low = INFINITE, high = -INFINITE;
        for (int lane = 0; lane < LANES; lane++) {
            low = sums.low[lane] < low ? sums.low[lane] : low;
            high = sums.high[lane] > high ? sums.high[lane] : high;
        }
        double weight = add_lanes(sums.weight), mean = add_lanes(sums.weighted) / weight;
        double plain_mean = add_lanes(sums.d) / vocabulary;
        int terms = count_terms(fmax(high - mean, mean - low));
        Vector spread = {0}, rest = {0}, excess = {0};
        for (int64_t at = 0; at < vocabulary; at += LANES) {
            Vector d = load_floats(differences + at), c = d - mean, over_mean = d - plain_mean, series = {0};
            Vector share = load_floats(weights + at) * c;
            /* e**c - 1 - c = c**2/2 (1 + c/3 (1 + c/4 (...))), in which no term hides another. */
            series += 1.0;
            for (int divisor = terms + 1; divisor > 2; divisor--)
                series = series * c * inverse[divisor] + 1.0;
            spread += (Vector)((Mask)(over_mean * over_mean) & (COUNTED < vocabulary - at));
            rest += share;
            excess += 0.5 * (share * c) * series;
        }
        double found[] = {
            add_lanes(sums.d), add_lanes(sums.dd), add_lanes(sums.ee), add_lanes(sums.de), add_lanes(sums.e),
            low, high, add_lanes(spread), mean, add_lanes(rest) / weight,
            terms ? add_lanes(excess) / weight : NAN,
        };
        memcpy(results + token * NUM_SUMS, found, sizeof found);
    }
}

/* The k largest values so far, largest first; of equal values the first. */
typedef struct {
    int64_t k, *ids;
    double *values;
} Largest;

static void insert(Largest *largest, double value, int64_t id) {
    int64_t at = largest->k - 1;
    for (; at > 0 && value > largest->values[at - 1]; at--) {
        largest->values[at] = largest->values[at - 1];
        largest->ids[at] = largest->ids[at - 1];
    }
    largest->values[at] = value;
    largest->ids[at] = id;
}

/* Return 1 if one of BATCH values is larger than `lowest`. */
ALWAYS_INLINE int is_any_larger(const char *values, int32_t dtype, double lowest) {
    Mask wide = {0};
    Words narrow = {0};
    for (int64_t at = 0; at < BATCH; at += LANES) {
        const char *source = values + at * SIZES[dtype];
        if (dtype == FLOAT64) wide |= load(source) > lowest;
        else narrow |= (Words)(widen_to_floats(source, dtype) > (float)lowest);
    }
    int64_t any = 0;
    for (int lane = 0; lane < LANES; lane++) any |= wide[lane] | (int64_t)narrow[lane];
    return any != 0;
}

ALWAYS_INLINE void find_in_row(const char *row, int32_t dtype, int64_t vocabulary, Largest largest) {
    const double *lowest = &largest.values[largest.k - 1];
    for (int64_t at = 0; at < vocabulary; at += BATCH) {
        const char *values = row + at * SIZES[dtype];
        int64_t count = smaller(BATCH, vocabulary - at);
        if (count == BATCH && !is_any_larger(values, dtype, *lowest)) continue;
        for (int64_t c = 0; c < count; c++) {
            double value = value_at(values, dtype, c);
            if (value > *lowest) insert(&largest, value, at + c);
        }
    }
}

/* Find ids and values of the k largest of each row, (T, k), largest first, of equal ones the first. A NaN is
smaller than all numbers. */
void find_largest(
    Matrix matrix, int64_t vocabulary, int64_t k, int64_t first, int64_t last, int64_t *ids, double *values
) {
    for (int64_t token = first; token < last; token++) {
        Largest largest = {k, ids + token * k, values + token * k};
        const char *row = row_of(&matrix, token, 0);
        for (int64_t at = 0; at < k; at++) {
            largest.values[at] = -INFINITE;
            largest.ids[at] = at;
        }
        switch (matrix.dtype) {
        case FLOAT64: find_in_row(row, FLOAT64, vocabulary, largest); break;
        case FLOAT32: find_in_row(row, FLOAT32, vocabulary, largest); break;
        case BFLOAT16: find_in_row(row, BFLOAT16, vocabulary, largest); break;
        default: find_in_row(row, FLOAT16, vocabulary, largest);
        }
    }
}
