// [1] ground: arenas, number types, random numbers, files.
#include "test.h"

static void arena_counts_what_it_gives(void **state) {
    (void)state;
    SftArena plan = {.name = "plan"}, real;
    sft_take(&plan, 1), sft_take(&plan, 65);
    assert_int_equal(plan.peak, 64 + 128);
    sft_arena_open(&real, "real", plan.peak);
    char *a = sft_take(&real, 1), *b = sft_take(&real, 65);
    assert_int_equal(b - a, 64);
    for (int i = 0; i < 65; i++) assert_int_equal(b[i], 0);
    EXPECT_ERROR(sft_take(&real, 1), "real holds 192 bytes");
    sft_arena_close(&real);
}

// What the 16 bits of a number mean, from the definition: sign, `bits` of mantissa, exponent with its bias. Infinity
// reads as the next power of two, which is what rounding compares with.
static double meaning(uint32_t h, int bits, int bias) {
    int exponent = (int)(h & 0x7fff) >> bits, mantissa = (int)h & ((1 << bits) - 1);
    double x = exponent ? ldexp(mantissa + (1 << bits), exponent - bias - bits) : ldexp(mantissa, 1 - bias - bits);
    return h & 0x8000 ? -x : x;
}

// Nearest 16-bit number by search over all of them; on a tie the one whose last bit is 0.
static uint32_t nearest(double x, int bits, int bias) {
    double size = fabs(x);
    uint32_t low = 0, high = 0x7fffu >> bits << bits, sign = signbit(x) ? 0x8000 : 0; // high: infinity
    if (size >= meaning(high, bits, bias)) return high | sign;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        *(meaning(middle, bits, bias) <= size ? &low : &high) = middle;
    }
    double down = size - meaning(low, bits, bias), up = meaning(high, bits, bias) - size;
    return (down < up || (down == up && !(low & 1)) ? low : high) | sign;
}

static void types_widen_every_number(void **state) {
    (void)state;
    static uint16_t h[65536], back[65536];
    static float x[65536];
    for (int i = 0; i < 65536; i++) h[i] = (uint16_t)i;
    for (SftType type = SFT_BF16; type <= SFT_F16; type++) {
        int bits = type == SFT_F16 ? 10 : 7, bias = type == SFT_F16 ? 15 : 127, infinity = 0x7fff >> bits << bits;
        sft_to_f32(x, h, type, 65536);
        sft_from_f32(back, type, x, 65536);
        for (int i = 0; i < 65536; i++) {
            float one = type == SFT_F16 ? sft_f16_to_f32((uint16_t)i) : sft_bf16_to_f32((uint16_t)i);
            if ((i & 0x7fff) > infinity) { // NaN stays NaN
                assert_true(isnan(x[i]) && isnan(one) && (back[i] & 0x7fff) > infinity);
                continue;
            }
            if ((i & 0x7fff) == infinity) assert_true(isinf(x[i]) && !signbit(x[i]) == !(i >> 15));
            else assert_true((double)x[i] == meaning((uint32_t)i, bits, bias) && !signbit(x[i]) == !(i >> 15));
            assert_int_equal(sft_f32_bits(one), sft_f32_bits(x[i]));
            assert_int_equal(back[i], i);
        }
    }
}

static void types_round_to_nearest_even(void **state) {
    (void)state;
    enum { N = 400001 }; // not a multiple of a vector
    float *x = SFT_NEW(float, N);
    uint16_t *h = SFT_NEW(uint16_t, N);
    for (SftType type = SFT_BF16; type <= SFT_F16; type++) {
        int bits = type == SFT_F16 ? 10 : 7, bias = type == SFT_F16 ? 15 : 127;
        // any bits; fp16's range and below; near, on and beside the middle of two neighbours
        for (int i = 0; i < N; i++) {
            uint64_t random = sft_random(7, type, 0, (uint64_t)i);
            x[i] = sft_bits_f32((uint32_t)random);
            if (i % 3 == 1) x[i] = (float)ldexp(sft_uniform(random) * 2 - 1, 17 - (int)(random % 48));
            if (i % 3 == 2)
                x[i] = sft_bits_f32(((uint32_t)random & 0xffff8000u >> (10 - bits)) + (uint32_t)(random >> 33) % 3 - 1);
        }
        const float edges[] = {0.f, -0.f, 65504.f, 65519.99f, 65520.f, -65536.f, 0x1p-24f, 0x1p-25f, 0x1.000002p-25f,
                               0x1p-126f, 0x1p-149f, 0x1.ffcp-15f, 0x1.ffep-15f, 0x1.fffffep127f, -0x1.fep127f,
                               0x1.ffp127f, INFINITY, -INFINITY, NAN};
        memcpy(x, edges, sizeof edges);
        sft_from_f32(h, type, x, N);
        for (int i = 0; i < N; i++) {
            uint16_t one = type == SFT_F16 ? sft_f32_to_f16(x[i]) : sft_f32_to_bf16(x[i]);
            if (isnan(x[i]))
                assert_true((h[i] & 0x7fff) > 0x7fff >> bits << bits && (one & 0x7fff) > 0x7fff >> bits << bits);
            else if (h[i] != nearest(x[i], bits, bias) || one != h[i])
                fail_msg("%s of %a: %04x and %04x, expected %04x", sft_type_name(type), x[i], h[i], one,
                         nearest(x[i], bits, bias));
        }
    }
    free(x), free(h);
}

static void random_numbers_are_uniform_and_keyed(void **state) {
    (void)state;
    double sum = 0, squares = 0;
    for (int i = 0; i < 100000; i++) {
        double u = sft_uniform(sft_random(42, 0, 0, (uint64_t)i));
        assert_true(u >= 0 && u < 1);
        sum += u, squares += u * u;
    }
    assert_true(fabs(sum / 1e5 - 0.5) < 0.004); // 4 standard errors of the mean of 1e5 uniforms: 4 * 0.2887 / 316
    assert_true(fabs(squares / 1e5 - 1.0 / 3) < 0.004);
    assert_int_not_equal(sft_random(1, 0, 0, 0), sft_random(0, 1, 0, 0));
    assert_int_not_equal(sft_random(0, 0, 1, 0), sft_random(0, 0, 0, 1));
}

static void files_are_replaced_whole(void **state) {
    (void)state;
    char folder[] = "/tmp/sft_ground_XXXXXX", path[4096];
    assert_non_null(mkdtemp(folder));
    sft_path(path, folder, "a/b");
    sft_make_folder(path);
    sft_path(path, folder, "a/b/file");
    sft_write_file(path, "first", 5);
    sft_write_file(path, "second", 6);
    size_t n;
    char *text = sft_read_file(path, &n);
    assert_string_equal(text, "second");
    free(text);
    sft_write_file(path, "{\"a\": 1,\n \"a\": 2}", 17);
    EXPECT_ERROR(sft_json_file(path), "line 2");
    sft_write_file(path, "\xef\xbb\xbf{\"a\": [1, ]}", 15); // the mark is no part of the text
    EXPECT_ERROR(sft_json_file(path), "line 1, column 11: unexpected token near ']': a trailing comma");
    EXPECT_ERROR(sft_read_file("/nowhere/at/all", NULL), "/nowhere/at/all");
    unlink(path);
}

SFT_TEST_MAIN(cmocka_unit_test(arena_counts_what_it_gives), cmocka_unit_test(types_widen_every_number),
              cmocka_unit_test(types_round_to_nearest_even), cmocka_unit_test(random_numbers_are_uniform_and_keyed),
              cmocka_unit_test(files_are_replaced_whole))
