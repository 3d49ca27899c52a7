/* The update of a run of elements, for one storage type. Include this file once per type with
 *
 *   RUN                   the name of the function
 *   STORE, REAL           the types of storage and of computation
 *   LOAD(x), SAVE(x)      conversions between the two
 *   SQRT(x)               the square root of a REAL
 *   POWER(x)              x to the exponent, for positive normal x
 *   EIGHTH(x), FIFTH(x)   x to -1/4 and -2/5, the exponents at p = 1/8 and p = 1/5, for such x
 *   ANY_POWER(x)          x to the exponent, for any x
 *   ROOT_CORRECTED(x)     x / sqrt(1 - beta2^t)
 *   BITS                  the integer type as wide as REAL
 *   BITS_OF(x)            the bits of a REAL
 *   ONLY_IF(mask, x)      x if the mask (of type BITS) is -1, and 0 if it is 0
 *   EITHER(mask, x, y)    x if the mask is -1, and y if it is 0
 *   NORMAL, INFINITE      the bits of the smallest normal number and of infinity
 *   MAGNITUDE(x)          |x| of STORE as an integer with the same order; infinity and NaN are last
 *   STORED_INFINITE       the magnitude of infinity
 *
 * The average to `fold` the new parameters into, if any, has type REAL. Parameters that are not
 * finite are not folded in. With fold == 2, a `point` between each new parameter and its average is
 * written, too. Returns the largest magnitude of a new parameter.
 *
 * The code is written to be vectorized: no branch depends on an element, and mode, amsgrad, fold
 * and any_weight are constants after inlining. Each block is processed in two passes while it is in
 * the innermost cache, because the dependency chain from gradient to weight is too long for one.
 */
ALWAYS_INLINE int64_t RUN(const Coefficients *c, STORE *restrict param, const STORE *restrict grad,
                          STORE *restrict exp_avg, STORE *restrict exp_avg_sq,
                          STORE *restrict max_exp_avg_sq, REAL *restrict average,
                          STORE *restrict point, int64_t n, const int mode, const int amsgrad,
                          const int fold, const int any_weight)
{
    const Coefficients k = *c;
    const REAL sign = (REAL)k.grad_factor, l2 = (REAL)k.l2, keep = (REAL)k.keep;
    const REAL new2 = (REAL)k.one_minus_beta2;
    const REAL beta2 = (REAL)k.beta2, eps = (REAL)k.eps, size = (REAL)k.step_size;
    const REAL correction2 = (REAL)k.correction2, root2 = (REAL)k.root_correction2;
    const REAL inverse_root2 = (REAL)(1.0 / k.root_correction2);
    /* Choices that are the same for all elements are masks: compilers tend to split a loop at an
     * `if` and to vectorize only one half. */
    const BITS has_l2 = k.l2 != 0.0 ? -1 : 0;
    const BITS from_average = !any_weight || k.fold_weight < 0.5 ? -1 : 0;
    const BITS from_moment = k.one_minus_beta1 < 0.5 ? -1 : 0;
    const REAL share = (REAL)(from_average ? k.fold_weight : k.fold_weight - 1.0);
    const REAL share1 = (REAL)(from_moment ? k.one_minus_beta1 : k.one_minus_beta1 - 1.0);
    const REAL from_mean = (REAL)(1.0 - k.interpolation);
    REAL denominator[BLOCK]; /* or the base of the power in the denominator */
    BITS worst = 0;
    (void)root2, (void)inverse_root2, (void)from_mean;

    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t length = n - start < BLOCK ? n - start : BLOCK;
        STORE *restrict p_ = param + start, *restrict m_ = exp_avg + start;
        STORE *restrict v_ = exp_avg_sq + start, *restrict max_ = max_exp_avg_sq + start;
        const STORE *restrict g_ = grad + start;
        REAL *restrict a_ = average + start;
        STORE *restrict y_ = point + start;
        (void)y_;
        BITS least = INFINITE, most = 0;

#pragma omp simd reduction(min : least) reduction(max : most)
        for (int64_t i = 0; i < length; ++i) {
            const REAL p = LOAD(p_[i]);
            const REAL g = LOAD(g_[i]) * sign + l2 * ONLY_IF(has_l2, p);
            REAL m = LOAD(m_[i]), v = LOAD(v_[i]);
            /* torch's lerp has two forms, exact at weights 0 and 1. Use them here too. */
            m = EITHER(from_moment, m, g) + share1 * (g - m);
            v = v * beta2 + new2 * g * g;
            m_[i] = SAVE(m);
            v_[i] = SAVE(v);
            REAL second = mode == MODE_PAPER ? v / correction2 : v;
            if (amsgrad) { /* NaN wins, as in torch.maximum */
                const REAL before = LOAD(max_[i]);
                second = second < before ? before : second;
                second = before != before ? before : second;
                max_[i] = SAVE(second);
            }
            REAL d;
            if (mode == MODE_HALF)
                d = ROOT_CORRECTED(SQRT(second)) + eps;
            else if (mode == MODE_PAPER)
                d = second + eps;
            else
                d = SQRT(second) + eps;
            denominator[i] = d;
            if (mode != MODE_HALF) {
                const BITS bits = BITS_OF(d);
                least = bits < least ? bits : least;
                most = bits > most ? bits : most;
            }
        }

        /* In the power, the special cases (zeros, subnormal numbers, infinities, and NaN, which has
         * the sign bit or is above infinity) take a fifth of the total time: handle them only in
         * blocks that have any. */
        const int plain = least >= NORMAL && most < INFINITE;
        /* Prefetch the next block. */
        for (int64_t i = BLOCK; i < 2 * BLOCK; i += LINE / (int)sizeof(STORE)) {
            PREFETCH(p_ + i);
            PREFETCH(g_ + i);
            PREFETCH(m_ + i);
            PREFETCH(v_ + i);
        }
        if (fold)
            for (int64_t i = BLOCK; i < 2 * BLOCK; i += LINE / (int)sizeof(REAL))
                PREFETCH(a_ + i);
        if (fold == 2)
            for (int64_t i = BLOCK; i < 2 * BLOCK; i += LINE / (int)sizeof(STORE))
                PREFETCH(y_ + i);
#define APPLY(expression)                                                                          \
    _Pragma("omp simd reduction(max : worst)") for (int64_t i = 0; i < length; ++i)                \
    {                                                                                              \
        const REAL d = denominator[i], m = LOAD(m_[i]);                                            \
        const STORE stored = SAVE(LOAD(p_[i]) * keep - size * m expression);                       \
        p_[i] = stored;                                                                            \
        const BITS magnitude = MAGNITUDE(stored);                                                  \
        worst = magnitude > worst ? magnitude : worst;                                             \
        if (fold) {                                                                                \
            const REAL p = LOAD(stored), a = a_[i];                                                \
            const BITS finite = magnitude < STORED_INFINITE ? -1 : 0;                              \
            const REAL mean = EITHER(finite, EITHER(from_average, a, p) + share * (p - a), a);     \
            a_[i] = mean;                                                                          \
            if (fold == 2)                                                                         \
                y_[i] = SAVE(mean + from_mean * (p - mean));                                       \
        }                                                                                          \
    }
        if (mode == MODE_HALF) {
            APPLY(/ d)
        } else if (!plain) {
            APPLY(*ANY_POWER(d))
        } else if (mode == MODE_EIGHTH) {
            APPLY(*EIGHTH(d))
        } else if (mode == MODE_FIFTH) {
            APPLY(*FIFTH(d))
        } else {
            APPLY(*POWER(d))
        }
    }
    return worst;
}

#undef APPLY
#undef RUN
#undef STORE
#undef REAL
#undef LOAD
#undef SAVE
#undef SQRT
#undef POWER
#undef EIGHTH
#undef FIFTH
#undef ANY_POWER
#undef ROOT_CORRECTED
#undef BITS
#undef BITS_OF
#undef ONLY_IF
#undef EITHER
#undef NORMAL
#undef INFINITE
#undef MAGNITUDE
#undef STORED_INFINITE
