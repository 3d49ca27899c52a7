/* The Adam-family step on the CPU: one pass over memory for any number of tensors.
 *
 * It uses plain pointers and only standard C headers, so one build works with every version of
 * torch and Python. See gadam.Padam for the math, gadam/optim/update.py for the reference that
 * tests compare with, and gadam/optim/cpu.py for the caller of `gadam_step`.
 */
#define _POSIX_C_SOURCE 200809L
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef _WIN32
#include <unistd.h>
#endif

#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver pow, pow@GLIBC_2.2.5"); /* the newest pow needs glibc 2.29 */
#endif

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define PREFETCH(address) __builtin_prefetch(address, 1)

enum { MODE_HALF, MODE_EIGHTH, MODE_FIFTH, MODE_PARTIAL, MODE_PAPER }; /* p = 1/2, 1/8, 1/5, … */
enum { BLOCK = 128, LINE = 64 /* bytes of a cache line */ };
enum { TYPE_F32, TYPE_F64, TYPE_BF16, TYPE_F16 };

/* The arguments from gadam/optim/cpu.py. Tensors are addresses. */
typedef struct {
    int64_t tensors;
    const uintptr_t *param, *grad, *average;
    const uintptr_t *point; /* where to write a point between parameter and average, if fold == 2 */
    const uintptr_t *state; /* per tensor: exp_avg, exp_avg_sq, max_exp_avg_sq if amsgrad, step */
    const int64_t *numel;
    double lr, beta1, beta2, eps, weight_decay, partial;
    double grad_factor; /* 1, or -1 to maximize, divided by GradScaler's scale */
    double fold_weight; /* the weight of the sample in the average */
    double interpolation; /* of the point: 0 at the parameter, 1 at the average */
    int32_t type, step_type;
    int32_t decoupled, amsgrad, paper;
    int32_t fold; /* 1: fold the updated parameters into the average; 2: also write the point */
    int32_t threads;
    int32_t not_finite; /* output: whether any parameter is not finite after the step */
} Job;

typedef struct {
    float e, hi, lo, at_zero, at_infinity, at_nan;
    double e64, hi64, lo64;
} Exponent;

/* The coefficients of one tensor. */
typedef struct {
    double grad_factor, l2, keep, one_minus_beta1, beta2, one_minus_beta2, eps;
    double correction2, root_correction2, step_size, fold_weight, interpolation;
    Exponent exponent;
} Coefficients;

/* ------------------------------------------------------------------------------------- powers
 *
 * x^e = 2^(e log2 x) for x >= 0, |e| < 1. With x = 2^k (1 + f), sqrt(1/2) <= 1 + f < sqrt(2), the
 * term e k is split into (hi + lo) k so that hi k is exact. Then the size of the exponent costs no
 * digits of the result: the error is at most three units in the last place for all x and e.
 */

ALWAYS_INLINE float as_float(int32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

ALWAYS_INLINE int32_t float_bits(float x)
{
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

ALWAYS_INLINE double as_double(int64_t bits)
{
    double x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

ALWAYS_INLINE int64_t double_bits(double x)
{
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

ALWAYS_INLINE float power_f32(float x, Exponent exponent, const int any)
{
    /* Subnormal numbers have no exponent bits: scale them by 2^24 to normal ones. */
    const int tiny = any && x < 1.17549435e-38f;
    const float y = tiny ? x * 16777216.0f : x;
    const int32_t bits = float_bits(y);
    const int32_t k_bits = (bits - 0x3f3504f3) & (int32_t)0xff800000;
    const float k = (float)k_bits - (tiny ? 24.0f * 8388608.0f : 0.0f); /* times 2^23 */
    /* e k = n + part with integer n: independent of the logarithm, so both run in parallel. */
    const float whole = exponent.hi * k, shifted = whole + 12582912.0f; /* 1.5 · 2^23 rounds */
    const float part = (whole - (shifted - 12582912.0f)) + exponent.lo * k;
    const float f = as_float(bits - k_bits) - 1.0f, f2 = f * f, f4 = f2 * f2;
    /* log2(1 + f) / f in independent pairs: relative error at most 1.7e-7, of a term below 1/2 */
    const float l01 = 1.4426949f - 0.72135282f * f, l23 = 0.48092324f - 0.36023962f * f;
    const float l45 = 0.2870988f - 0.24887717f * f, l67 = 0.23404178f - 0.14580993f * f;
    const float r = (exponent.e * f) * ((l01 + l23 * f2) + f4 * (l45 + l67 * f2)) + part;
    const float r2 = r * r;
    /* 2^r, |r| <= 1: relative error at most 1.0e-8 */
    const float e01 = 1.0f + 6.93147242e-1f * r, e23 = 2.40226805e-1f + 5.55037893e-2f * r;
    const float e45 = 9.61656589e-3f + 1.33393239e-3f * r;
    const float e67 = 1.56627997e-4f + 1.50504075e-5f * r;
    const float exp2_r = e01 + r2 * (e23 + r2 * (e45 + r2 * e67));
    float result = as_float(float_bits(exp2_r) + (int32_t)((uint32_t)float_bits(shifted) << 23));
    if (any) {
        const float beyond = x == INFINITY ? exponent.at_infinity : exponent.at_nan;
        result = x == 0.0f ? exponent.at_zero : result;
        result = x < INFINITY ? result : beyond;
    }
    return result;
}

/* x^(-1/4) from an estimate by its bits (accurate to 3 %) and two third-order iterations:
 * z <- z (1 + h/4 + 5 h^2/32), h = 1 - x z^4. */
ALWAYS_INLINE float eighth_f32(float x)
{
    float z = as_float(0x4f58cae5 - (float_bits(x) >> 2)), z2 = z * z, h = 1.0f - x * (z2 * z2);
    z += z * (h * (0.25f + 0.15625f * h));
    z2 = z * z;
    h = 1.0f - x * (z2 * z2);
    return z + z * (h * (0.25f + 0.15625f * h));
}

/* x^(-2/5), the paper's p for language models, in the same way: z ≈ x^(-1/5), h = 1 - x z^5. */
ALWAYS_INLINE float fifth_f32(float x)
{
    float z = as_float((int32_t)(1277950000.0f - 0.2f * (float)float_bits(x)));
    float z2 = z * z, h = 1.0f - (x * z) * (z2 * z2);
    z += z * (h * (0.2f + 0.12f * h));
    z2 = z * z;
    h = 1.0f - (x * z) * (z2 * z2);
    return z2 + z2 * (h * (0.4f + 0.28f * h));
}

ALWAYS_INLINE double power_f64(double x, Exponent exponent)
{
    const int tiny = x < 2.2250738585072014e-308;
    const double y = tiny ? x * 18014398509481984.0 /* 2^54 */ : x;
    const int64_t bits = double_bits(y);
    const int64_t k_bits = (bits - 0x3fe6a09e667f3bcd) & (int64_t)0xfff0000000000000;
    const double k = (double)(int32_t)(k_bits >> 52) - (tiny ? 54.0 : 0.0);
    const double m = as_double(bits - k_bits);
    /* log2 m = 2/ln 2 (s + s^3/3 + s^5/5 + ...), s = (m - 1)/(m + 1), |s| < 0.172 */
    const double s = (m - 1.0) / (m + 1.0), z = s * s;
    double series = 1.0 / 21;
    series = series * z + 1.0 / 19;
    series = series * z + 1.0 / 17;
    series = series * z + 1.0 / 15;
    series = series * z + 1.0 / 13;
    series = series * z + 1.0 / 11;
    series = series * z + 1.0 / 9;
    series = series * z + 1.0 / 7;
    series = series * z + 1.0 / 5;
    series = series * z + 1.0 / 3;
    series = series * z + 1.0;
    const double log2_m = 2.8853900817779268 * s * series;
    const double whole = exponent.hi64 * k;
    const double rest = exponent.e64 * log2_m + exponent.lo64 * k;
    const double shifted = (whole + rest) + 6755399441055744.0; /* 1.5 · 2^52 */
    const double n = shifted - 6755399441055744.0;
    const double r = ((whole - n) + rest) * 0.69314718055994531; /* e^r, |r| < 0.347 */
    double exp_r = 1.0 / 87178291200.0;
    exp_r = exp_r * r + 1.0 / 6227020800.0;
    exp_r = exp_r * r + 1.0 / 479001600;
    exp_r = exp_r * r + 1.0 / 39916800;
    exp_r = exp_r * r + 1.0 / 3628800;
    exp_r = exp_r * r + 1.0 / 362880;
    exp_r = exp_r * r + 1.0 / 40320;
    exp_r = exp_r * r + 1.0 / 5040;
    exp_r = exp_r * r + 1.0 / 720;
    exp_r = exp_r * r + 1.0 / 120;
    exp_r = exp_r * r + 1.0 / 24;
    exp_r = exp_r * r + 1.0 / 6;
    exp_r = exp_r * r + 1.0 / 2;
    exp_r = exp_r * r + 1.0;
    exp_r = exp_r * r + 1.0;
    double result = as_double(double_bits(exp_r) + (int64_t)((uint64_t)double_bits(shifted) << 52));
    result = x == 0.0 ? exponent.at_zero : result;
    const double beyond = x == INFINITY ? exponent.at_infinity : exponent.at_nan;
    return x < INFINITY ? result : beyond;
}

/* ------------------------------------------------------------------------- half-precision types */

ALWAYS_INLINE float load_bf16(uint16_t x) { return as_float((int32_t)((uint32_t)x << 16)); }

ALWAYS_INLINE uint16_t save_bf16(float x)
{
    const uint32_t bits = (uint32_t)float_bits(x);
    const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(x != x ? 0x7fc0u : rounded);
}

ALWAYS_INLINE float load_f16(uint16_t x)
{
    const uint32_t sign = (uint32_t)(x & 0x8000u) << 16, magnitude = (uint32_t)(x & 0x7fffu) << 13;
    /* Multiplying by 2^112 adjusts the exponent's bias and makes subnormal numbers normal. */
    const float scaled = as_float((int32_t)magnitude) * 5.192296858534828e33f;
    const uint32_t finite = (uint32_t)float_bits(scaled), beyond = magnitude | 0x7f800000u;
    return as_float((int32_t)(sign | (magnitude >= 0x0f800000u ? beyond : finite)));
}

ALWAYS_INLINE uint16_t save_f16(float x)
{
    const uint32_t bits = (uint32_t)float_bits(x), sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    /* Normal: round to even at bit 13. */
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
    /* Subnormal: the addition of 1/2 rounds. */
    const uint32_t subnormal =
        (uint32_t)float_bits(as_float((int32_t)magnitude) + 0.5f) - 0x3f000000u;
    uint32_t result = magnitude < 0x38800000u ? subnormal : normal;
    result = magnitude >= 0x477ff000u ? 0x7c00u : result;
    result = magnitude > 0x7f800000u ? 0x7e00u : result;
    return (uint16_t)(sign | result);
}

/* ---------------------------------------------------------------------------- the four types */

#define IDENTITY(x) (x)
#define POWER_F32(x) power_f32(x, k.exponent, 0)
#define ANY_POWER_F32(x) power_f32(x, k.exponent, 1)
#define TIMES_INVERSE(x) ((x) * inverse_root2)
#define MAGNITUDE_16(x) ((int32_t)((x) & 0x7fffu))
#define ONLY_IF_F32(mask, x) as_float(float_bits(x) & (mask))
#define EITHER_F32(mask, x, y) as_float((float_bits(x) & (mask)) | (float_bits(y) & ~(mask)))

#define RUN run_f32
#define STORE float
#define REAL float
#define LOAD IDENTITY
#define SAVE IDENTITY
#define SQRT sqrtf
#define POWER POWER_F32
#define EIGHTH eighth_f32
#define FIFTH fifth_f32
#define ANY_POWER ANY_POWER_F32
#define ROOT_CORRECTED TIMES_INVERSE
#define BITS int32_t
#define BITS_OF float_bits
#define ONLY_IF ONLY_IF_F32
#define EITHER EITHER_F32
#define NORMAL 0x00800000
#define INFINITE 0x7f800000
#define MAGNITUDE(x) (float_bits(x) & 0x7fffffff)
#define STORED_INFINITE INFINITE
#include "element.h"

#define RUN run_f64
#define STORE double
#define REAL double
#define LOAD IDENTITY
#define SAVE IDENTITY
#define SQRT sqrt
#define POWER(x) power_f64(x, k.exponent)
#define EIGHTH(x) (1.0 / sqrt(sqrt(x)))
#define FIFTH POWER
#define ANY_POWER POWER
#define ROOT_CORRECTED(x) ((x) / root2)
#define BITS int64_t
#define BITS_OF double_bits
#define ONLY_IF(mask, x) as_double(double_bits(x) & (mask))
#define EITHER(mask, x, y) as_double((double_bits(x) & (mask)) | (double_bits(y) & ~(mask)))
#define NORMAL 0x0010000000000000
#define INFINITE 0x7ff0000000000000
#define MAGNITUDE(x) (double_bits(x) & 0x7fffffffffffffff)
#define STORED_INFINITE INFINITE
#include "element.h"

#define RUN run_bf16
#define STORE uint16_t
#define REAL float
#define LOAD load_bf16
#define SAVE save_bf16
#define SQRT sqrtf
#define POWER POWER_F32
#define EIGHTH eighth_f32
#define FIFTH fifth_f32
#define ANY_POWER ANY_POWER_F32
#define ROOT_CORRECTED TIMES_INVERSE
#define BITS int32_t
#define BITS_OF float_bits
#define ONLY_IF ONLY_IF_F32
#define EITHER EITHER_F32
#define NORMAL 0x00800000
#define INFINITE 0x7f800000
#define MAGNITUDE MAGNITUDE_16
#define STORED_INFINITE 0x7f80
#include "element.h"

#define RUN run_f16
#define STORE uint16_t
#define REAL float
#define LOAD load_f16
#define SAVE save_f16
#define SQRT sqrtf
#define POWER POWER_F32
#define EIGHTH eighth_f32
#define FIFTH fifth_f32
#define ANY_POWER ANY_POWER_F32
#define ROOT_CORRECTED TIMES_INVERSE
#define BITS int32_t
#define BITS_OF float_bits
#define ONLY_IF ONLY_IF_F32
#define EITHER EITHER_F32
#define NORMAL 0x00800000
#define INFINITE 0x7f800000
#define MAGNITUDE MAGNITUDE_16
#define STORED_INFINITE 0x7c00
#include "element.h"

/* ---------------------------------------------------------- variants and instruction sets */

/* Updates n elements from the given addresses on. Returns the largest magnitude afterwards. */
typedef int64_t Run(const Coefficients *, void *param, void *grad, void *exp_avg, void *exp_avg_sq,
                    void *max_exp_avg_sq, void *average, void *point, int64_t n);

/* Each combination of constants is a separate function. A single function with all of them is too
 * complex for compilers to optimize well. */
#define VARIANT(TARGET, set, type, mode, amsgrad, fold)                                            \
    TARGET static int64_t set##_##type##_##mode##_##amsgrad##fold(                                 \
        const Coefficients *c, void *param, void *grad, void *exp_avg, void *exp_avg_sq,           \
        void *max_exp_avg_sq, void *average, void *point, int64_t n)                               \
    {                                                                                              \
        return run_##type(c, param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, average, point, n,  \
                          mode, amsgrad, fold, any_weight_##set);                                  \
    }
#define OF_MODE(TARGET, set, type, mode)                                                           \
    VARIANT(TARGET, set, type, mode, 0, 0)                                                         \
    VARIANT(TARGET, set, type, mode, 0, 1)                                                         \
    VARIANT(TARGET, set, type, mode, 0, 2)                                                         \
    VARIANT(TARGET, set, type, mode, 1, 0)                                                         \
    VARIANT(TARGET, set, type, mode, 1, 1)                                                         \
    VARIANT(TARGET, set, type, mode, 1, 2)
#define OF_TYPE(TARGET, set, type)                                                                 \
    OF_MODE(TARGET, set, type, MODE_HALF)                                                          \
    OF_MODE(TARGET, set, type, MODE_EIGHTH)                                                        \
    OF_MODE(TARGET, set, type, MODE_FIFTH)                                                         \
    OF_MODE(TARGET, set, type, MODE_PARTIAL)                                                       \
    OF_MODE(TARGET, set, type, MODE_PAPER)
#define NAMES_OF_MODE(set, type, mode)                                                             \
    {                                                                                              \
        {set##_##type##_##mode##_00, set##_##type##_##mode##_01, set##_##type##_##mode##_02},      \
        {                                                                                          \
            set##_##type##_##mode##_10, set##_##type##_##mode##_11, set##_##type##_##mode##_12     \
        }                                                                                          \
    }
#define NAMES_OF_TYPE(set, type)                                                                   \
    {                                                                                              \
        NAMES_OF_MODE(set, type, MODE_HALF), NAMES_OF_MODE(set, type, MODE_EIGHTH),                \
            NAMES_OF_MODE(set, type, MODE_FIFTH), NAMES_OF_MODE(set, type, MODE_PARTIAL),          \
            NAMES_OF_MODE(set, type, MODE_PAPER)                                                   \
    }

typedef Run *Table[4][5][2][3]; /* by type, mode, amsgrad, fold */

#define INSTRUCTION_SET(set, TARGET)                                                               \
    OF_TYPE(TARGET, set, f32)                                                                      \
    OF_TYPE(TARGET, set, f64)                                                                      \
    OF_TYPE(TARGET, set, bf16)                                                                     \
    OF_TYPE(TARGET, set, f16)                                                                      \
    static Table set = {NAMES_OF_TYPE(set, f32), NAMES_OF_TYPE(set, f64),                          \
                        NAMES_OF_TYPE(set, bf16), NAMES_OF_TYPE(set, f16)};

/* torch's lerp has two forms, one exact at weight 0 and the other at 1. For the average, the faster
 * sets implement only the first, for weights below 1/2. Others use the baseline. */
enum { any_weight_baseline = 1, any_weight_avx2 = 0, any_weight_avx512 = 0 };

INSTRUCTION_SET(baseline, )
#if defined(__x86_64__) && defined(__GNUC__)
INSTRUCTION_SET(avx2, __attribute__((target("avx2,fma"))))
INSTRUCTION_SET(avx512, __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma"))))
#endif

static Table *variants;
static const char *instruction_set;

static void choose_instruction_set(void)
{
    const char *limit = getenv("GADAM_CPU_CAPABILITY"); /* for tests: "baseline" or "avx2" */
    variants = &baseline;
#if defined(__aarch64__)
    instruction_set = "neon";
#else
    instruction_set = "baseline";
#endif
#if defined(__x86_64__) && defined(__GNUC__)
    if (limit && !strcmp(limit, "baseline"))
        return;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        variants = &avx2;
        instruction_set = "avx2";
        if (limit && !strcmp(limit, "avx2"))
            return;
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
            variants = &avx512;
            instruction_set = "avx512";
        }
    }
#else
    (void)limit;
#endif
}

/* ------------------------------------------------------------------------------------ the step */

static Exponent exponent_of(double e)
{
    Exponent x = {0};
    x.e64 = e;
    x.e = (float)e;
    /* hi has so few bits that its product with any k (for float, with 2^23 k) is exact. */
    x.hi = as_float(float_bits((float)e) & (int32_t)0xffffff00) * 0x1p-23f;
    x.lo = (float)(e * 0x1p-23 - (double)x.hi);
    x.hi64 = as_double(double_bits(e) & (int64_t)0xffffffff00000000);
    x.lo64 = e - x.hi64;
    x.at_zero = e == 0.0 ? 1.0f : INFINITY;
    x.at_infinity = e == 0.0 ? 1.0f : 0.0f;
    x.at_nan = e == 0.0 ? 1.0f : NAN;
    return x;
}

static Coefficients coefficients_at(const Job *job, double step)
{
    const double correction1 = 1.0 - pow(job->beta1, step);
    const double correction2 = 1.0 - pow(job->beta2, step);
    Coefficients c = {
        .grad_factor = job->grad_factor,
        .l2 = job->decoupled ? 0.0 : job->weight_decay,
        .keep = job->decoupled ? 1.0 - job->lr * job->weight_decay : 1.0,
        .one_minus_beta1 = 1.0 - job->beta1,
        .beta2 = job->beta2,
        .one_minus_beta2 = 1.0 - job->beta2,
        .eps = job->eps,
        .correction2 = correction2,
        .root_correction2 = sqrt(correction2),
        .step_size = job->lr / correction1,
        .fold_weight = job->fold_weight,
        .interpolation = job->interpolation,
        .exponent = exponent_of(job->paper ? -job->partial : -2.0 * job->partial),
    };
    if (!job->paper && job->partial != 0.5)
        c.step_size *= c.root_correction2;
    return c;
}

static const uintptr_t *state_of(const Job *job, int64_t tensor)
{
    return job->state + tensor * (job->amsgrad ? 4 : 3);
}

static double count_step(const Job *job, int64_t tensor)
{
    const uintptr_t step = state_of(job, tensor)[job->amsgrad ? 3 : 2];
    return job->step_type == TYPE_F64 ? (*(double *)step += 1.0) : (*(float *)step += 1.0f);
}

/* The number of elements that a thread processes at a time. It is fixed, so that results do not
 * depend on the number of threads. It is small, so that a preempted thread does not delay the
 * others much, but not smaller: hardware prefetching restarts with every chunk. With 16384, a
 * step takes up to a sixth longer where memory is fast. */
enum { CHUNK = 65536 };

static const int64_t infinity_bits[] = {0x7f800000, 0x7ff0000000000000, 0x7f80, 0x7c00};
static const int64_t item_size[] = {4, 8, 2, 2};

/* Returns 1 if all of the chunk is finite. */
static int run_chunk(const Job *job, const Coefficients *c, const int64_t *offset, int64_t chunk)
{
    const int mode = job->paper              ? MODE_PAPER
                     : job->partial == 0.5   ? MODE_HALF
                     : job->partial == 0.125 ? MODE_EIGHTH
                     : job->partial == 0.2   ? MODE_FIFTH
                                             : MODE_PARTIAL;
    const int unusual = job->fold && job->fold_weight >= 0.5;
    Table *table = unusual ? &baseline : variants;
    Run *run = (*table)[job->type][mode][job->amsgrad != 0][job->fold];
    const int64_t width = item_size[job->type], wide = job->type == TYPE_F64 ? 8 : 4;
    int64_t from = chunk * CHUNK, to = from + CHUNK, low = 0, high = job->tensors, worst = 0;
    while (high - low > 1) { /* find the last tensor that begins at or before `from` */
        const int64_t middle = low + (high - low) / 2;
        if (offset[middle] <= from)
            low = middle;
        else
            high = middle;
    }
    if (to > offset[job->tensors])
        to = offset[job->tensors];
#define AT(address, size) ((void *)((address) + (uintptr_t)((from - offset[t]) * (size))))
    for (int64_t t = low; from < to; ++t) {
        const int64_t end = to < offset[t + 1] ? to : offset[t + 1];
        if (end == from)
            continue;
        const uintptr_t *state = state_of(job, t);
        const int64_t magnitude =
            run(c + t, AT(job->param[t], width), AT(job->grad[t], width), AT(state[0], width),
                AT(state[1], width), job->amsgrad ? AT(state[2], width) : NULL,
                job->fold ? AT(job->average[t], wide) : NULL,
                job->fold == 2 ? AT(job->point[t], width) : NULL, end - from);
        worst = magnitude > worst ? magnitude : worst;
        from = end;
    }
    return worst < infinity_bits[job->type];
}

#ifndef _WIN32
static pid_t home;
#endif

/* GOMP_parallel: runs a function on all threads of a team, and waits for them. It is an entry point
 * of both GNU's and LLVM's OpenMP. The caller passes that of torch, so that both use the same
 * threads, whatever the name of torch's copy. Linking to OpenMP could load a second runtime, with
 * its own threads that spin on the same cores. */
typedef void (*Parallel)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);
static Parallel parallel;

/* Returns the name of the instruction set. Call once, before the first step. Without an OpenMP
 * runtime, pass NULL: the kernel then uses one thread. */
const char *gadam_open(Parallel openmp)
{
    choose_instruction_set();
    parallel = openmp;
#ifndef _WIN32
    home = getpid();
#endif
    return instruction_set;
}

/* Returns the size of Job, for the caller to compare with its own. */
int64_t gadam_job_size(void) { return (int64_t)sizeof(Job); }

/* Elementwise power, to test its accuracy. */
void gadam_power_f32(const float *x, float *y, int64_t n, double e)
{
    const Exponent exponent = exponent_of(e);
    for (int64_t i = 0; i < n; ++i)
        y[i] = power_f32(x[i], exponent, 1);
}

void gadam_power_f64(const double *x, double *y, int64_t n, double e)
{
    const Exponent exponent = exponent_of(e);
    for (int64_t i = 0; i < n; ++i)
        y[i] = power_f64(x[i], exponent);
}

/* A step that all threads of a team work on. */
typedef struct {
    const Job *job;
    const Coefficients *coefficients;
    const int64_t *offset;
    int64_t chunks;
    _Atomic int64_t next; /* the first chunk that no thread has taken */
    _Atomic int32_t not_finite;
} Team;

static void run_chunks(void *argument)
{
    Team *team = argument;
    for (;;) {
        const int64_t chunk = atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
        if (chunk >= team->chunks)
            break;
        if (!run_chunk(team->job, team->coefficients, team->offset, chunk))
            atomic_store_explicit(&team->not_finite, 1, memory_order_relaxed);
    }
}

/* Performs one step of all tensors of the job. Returns 0, or -1 if memory runs out, before any
 * change. */
int gadam_step(Job *job)
{
    const int64_t tensors = job->tensors;
    Coefficients *c = malloc((size_t)(tensors ? tensors : 1) * sizeof *c);
    int64_t *offset = malloc((size_t)(tensors + 1) * sizeof *offset);
    if (!c || !offset) {
        free(c);
        free(offset);
        return -1;
    }
    offset[0] = 0;
    double last = 0.0;
    for (int64_t t = 0; t < tensors; ++t) {
        const double step = count_step(job, t);
        c[t] = t && step == last ? c[t - 1] : coefficients_at(job, step);
        last = step;
        offset[t + 1] = offset[t] + job->numel[t];
    }
    const int64_t chunks = (offset[tensors] + CHUNK - 1) / CHUNK;
    int threads = job->threads < chunks ? job->threads : (int)chunks;
#ifndef _WIN32
    if (getpid() != home) /* OpenMP's threads do not survive a fork */
        threads = 1;
#endif
    Team team = {job, c, offset, chunks, 0, 0};
    if (parallel && threads > 1)
        parallel(run_chunks, &team, (unsigned)threads, 0);
    else
        run_chunks(&team);
    job->not_finite = team.not_finite;
    free(c);
    free(offset);
    return 0;
}
