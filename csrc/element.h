/* The update of a run of elements, for one storage type. Included once per type with
 *
 *   RUN                   the function's name
 *   STORE, REAL           how the tensors are stored, and in what they are computed
 *   LOAD(x), SAVE(x)      between the two
 *   SQRT(x)               of REAL
 *   POWER(x)              x to the exponent, of a positive and normal x
 *   EIGHTH(x), FIFTH(x)   to -1/4 and to -2/5, the exponents at p = 1/8 and p = 1/5, likewise
 *   ANY_POWER(x)          x to the exponent, of any x
 *   ROOT_CORRECTED(x)     x / sqrt(1 - beta2^t)
 *   BITS                  the integer as wide as REAL
 *   BITS_OF(x)            the bits of a REAL
 *   ONLY_IF(mask, x)      x where the mask (of BITS) is -1, 0 where it is 0
 *   EITHER(mask, x, y)    x where the mask is -1, y where it is 0
 *   NORMAL, INFINITE      the bits of the smallest normal number and of infinity
 *   MAGNITUDE(x)          |x| of STORE as an integer: the larger the larger, infinity and NaN on top
 *
 * The average, where there is one to `fold` the parameters into, is of type REAL. Gives the largest
 * magnitude of a new parameter.
 *
 * It is written for a compiler to vectorise: no branch depends on an element, and mode, amsgrad, fold
 * and any_weight are constants wherever it is inlined. A block is gone through twice, while it is in the
 * innermost cache: the chain from gradient to weight is too long to keep a processor busy.
 */
ALWAYS_INLINE int64_t RUN(const Coefficients *c, STORE *restrict param, const STORE *restrict grad,
                          STORE *restrict exp_avg, STORE *restrict exp_avg_sq,
                          STORE *restrict max_exp_avg_sq, REAL *restrict average, int64_t n,
                          const int mode, const int amsgrad, const int fold, const int any_weight)
{
    const Coefficients k = *c;
    const REAL sign = (REAL)k.grad_factor, l2 = (REAL)k.l2, keep = (REAL)k.keep;
    const REAL new2 = (REAL)k.one_minus_beta2;
    const REAL beta2 = (REAL)k.beta2, eps = (REAL)k.eps, size = (REAL)k.step_size;
    const REAL correction2 = (REAL)k.correction2, root2 = (REAL)k.root_correction2;
    const REAL inverse_root2 = (REAL)(1.0 / k.root_correction2);
    /* Masks where a choice is the same for all elements: compilers tend to make two loops of an `if`,
     * and to vectorise one of them. */
    const BITS has_l2 = k.l2 != 0.0 ? -1 : 0;
    const BITS from_average = !any_weight || k.fold_weight < 0.5 ? -1 : 0;
    const BITS from_moment = !any_weight || k.one_minus_beta1 < 0.5 ? -1 : 0;
    const REAL share = (REAL)(from_average ? k.fold_weight : k.fold_weight - 1.0);
    const REAL share1 = (REAL)(from_moment ? k.one_minus_beta1 : k.one_minus_beta1 - 1.0);
    REAL denominator[BLOCK]; /* or what is to be raised to a power for it */
    BITS worst = 0;
    (void)root2, (void)inverse_root2;

    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t length = n - start < BLOCK ? n - start : BLOCK;
        STORE *restrict p_ = param + start, *restrict m_ = exp_avg + start;
        STORE *restrict v_ = exp_avg_sq + start, *restrict max_ = max_exp_avg_sq + start;
        const STORE *restrict g_ = grad + start;
        REAL *restrict a_ = average + start;
        BITS least = INFINITE, most = 0;

#pragma omp simd reduction(min : least) reduction(max : most)
        for (int64_t i = 0; i < length; ++i) {
            const REAL p = LOAD(p_[i]);
            /* Averages and moments as by torch's lerp, whose two forms are exact at weights 0 and 1. */
            if (fold) {
                const REAL a = a_[i];
                a_[i] = EITHER(from_average, a, p) + share * (p - a);
            }
            const REAL g = LOAD(g_[i]) * sign + l2 * ONLY_IF(has_l2, p);
            REAL m = LOAD(m_[i]), v = LOAD(v_[i]);
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

        /* Zeros, subnormal numbers, infinities and NaN (negative by its sign bit or above infinity)
         * cost a fifth of the whole in the power: look only where there are any. */
        const int plain = least >= NORMAL && most < INFINITE;
        /* Let the next block come while this one is computed. */
        for (int64_t i = BLOCK; i < 2 * BLOCK; i += LINE / (int)sizeof(STORE)) {
            PREFETCH(p_ + i);
            PREFETCH(g_ + i);
            PREFETCH(m_ + i);
            PREFETCH(v_ + i);
        }
#define APPLY(expression)                                                                           \
    _Pragma("omp simd reduction(max : worst)") for (int64_t i = 0; i < length; ++i)                 \
    {                                                                                               \
        const REAL d = denominator[i], m = LOAD(m_[i]);                                             \
        const STORE stored = SAVE(LOAD(p_[i]) * keep - size * m expression);                        \
        p_[i] = stored;                                                                             \
        const BITS magnitude = MAGNITUDE(stored);                                                   \
        worst = magnitude > worst ? magnitude : worst;                                              \
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
