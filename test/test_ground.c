// [1] ground: arenas, random numbers, files.
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
    EXPECT_ERROR(sft_read_file("/nowhere/at/all", NULL), "/nowhere/at/all");
    unlink(path);
}

SFT_TEST_MAIN(cmocka_unit_test(arena_counts_what_it_gives), cmocka_unit_test(random_numbers_are_uniform_and_keyed), cmocka_unit_test(files_are_replaced_whole))
