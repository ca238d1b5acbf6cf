// [4] model: the safetensors reader and writer.
#include "test.h"

static char test_folder[] = "/tmp/sft_safetensors_XXXXXX", test_path[4096];
static int make_folder(void **state) {
    (void)state;
    if (!mkdtemp(test_folder)) return 1;
    sft_path(test_path, test_folder, "x.safetensors");
    return 0;
}
static int remove_folder(void **state) {
    (void)state;
    return unlink(test_path) | rmdir(test_folder); // and nothing else is there
}

// A file with this header and so many zero bytes of data.
static void put(const char *header, size_t data) {
    size_t n = strlen(header);
    char *file = sft_alloc(8 + n + data);
    for (int i = 0; i < 8; i++) file[i] = (char)((uint64_t)n >> 8 * i);
    memcpy(file + 8, header, n);
    sft_write_file(test_path, file, 8 + n + data);
    free(file);
}

#define ONE(dtype, shape, begin, end)                                                                                  \
    "{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" #begin "," #end "]}"

static void good_files_open(void **state) {
    (void)state;
    put("{}", 0);
    SftSafetensors f = sft_safetensors_open(test_path);
    assert_int_equal(f.n, 0);
    assert_null(sft_safetensors_find(&f, "a"));
    sft_safetensors_close(&f);
    put("{\"__metadata__\":{\"format\":\"pt\"},\"b\":" ONE("F32", "[2,3]", 2, 26) ",\"a\":"
        ONE("BF16", "[]", 0, 2) ",\"none\":" ONE("I64", "[4,0]", 2, 2) "}   ", 26);
    f = sft_safetensors_open(test_path);
    assert_int_equal(f.n, 3);
    const SftFileTensor *t = sft_safetensors_find(&f, "b");
    assert_string_equal(t->dtype, "F32");
    assert_true(t->dims == 2 && t->dim[0] == 2 && t->dim[1] == 3 && t->bytes == 24 && t->data == f.map + f.bytes - 24);
    t = sft_safetensors_find(&f, "a");
    assert_true(t->dims == 0 && t->bytes == 2);
    assert_int_equal(sft_safetensors_find(&f, "none")->bytes, 0);
    assert_null(sft_safetensors_find(&f, "__metadata__"));
    sft_safetensors_close(&f);
}

static void bad_files_are_refused(void **state) {
    (void)state;
    const struct { const char *header; size_t data; const char *words; } bad[] = {
        {"", 0, "does not begin with '{'"},
        {"[1]", 0, "does not begin with '{'"},
        {"{", 0, "the header, byte"},
        {"{} x", 0, "the header, byte"},
        {"{\"a\":" ONE("U8", "[1]", 0, 1) ",\"a\":" ONE("U8", "[1]", 0, 1) "}", 1, "duplicate"},
        {"{\"__metadata__\":1}", 0, "__metadata__"},
        {"{\"__metadata__\":{\"format\":1}}", 0, "format is not a string"},
        {"{\"a\":1}", 0, "tensor a: expected"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "tensor a: expected"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1, "tensor a: expected"},
        {"{\"a\":" ONE("U8", "[1.0]", 0, 1) "}", 1, "a dimension that is not"},
        {"{\"a\":" ONE("U8", "[-1]", 0, 1) "}", 1, "a dimension that is not"},
        {"{\"a\":" ONE("U8", "[1,1,1,1,1,1,1,1,1]", 0, 1) "}", 1, "9 dimensions"},
        {"{\"a\":" ONE("FLOAT", "[1]", 0, 1) "}", 1, "dtype FLOAT"},
        {"{\"a\":" ONE("F4", "[1]", 0, 1) "}", 1, "has no size in bytes"},
        {"{\"a\":" ONE("F32", "[4294967296,4294967296]", 0, 1) "}", 1, "has no size in bytes"},
        {"{\"a\":" ONE("U8", "[1]", -1, 0) "}", 1, "data_offsets [-1, 0]"},
        {"{\"a\":" ONE("U8", "[1]", 1, 0) "}", 1, "data_offsets [1, 0]"},
        {"{\"a\":" ONE("U8", "[2]", 0, 2) "}", 1, "the file has 1 bytes of data"},
        {"{\"a\":" ONE("F32", "[2]", 0, 4) "}", 4, "its shape takes 8 bytes"},
        {"{\"a\":" ONE("U8", "[1]", 1, 2) "}", 2, "comes after a hole"},
        {"{\"a\":" ONE("U8", "[1]", 0, 1) ",\"b\":" ONE("U8", "[1]", 2, 3) "}", 3, "tensor b comes after a hole"},
        {"{\"a\":" ONE("U8", "[2]", 0, 2) ",\"b\":" ONE("U8", "[2]", 1, 3) "}", 3, "tensor b overlaps"},
        {"{\"a\":" ONE("U8", "[1]", 0, 1) "}", 2, "1 bytes after the last tensor"},
        {"{}", 1, "1 bytes after the last tensor"},
    };
    for (int i = 0; i < SFT_COUNT(bad); i++) {
        put(bad[i].header, bad[i].data);
        EXPECT_ERROR(sft_safetensors_open(test_path), bad[i].words);
        if (!strstr(test__line, "x.safetensors: ")) fail_msg("the error does not name the file: %s", test__line);
    }
    sft_write_file(test_path, "1234567", 7);
    EXPECT_ERROR(sft_safetensors_open(test_path), "7 bytes are too few");
    sft_write_file(test_path, "\1\1\1\1\1\1\1\1{", 9);
    EXPECT_ERROR(sft_safetensors_open(test_path), "at most 100000000");
    sft_write_file(test_path, "\3\0\0\0\0\0\0\0{}", 10);
    EXPECT_ERROR(sft_safetensors_open(test_path), "cut short?");
}

// Every file cut at any byte is refused, and none reads beyond its end (the sanitizers watch).
static void cut_files_are_refused(void **state) {
    (void)state;
    put("{\"a\":" ONE("F32", "[2]", 0, 8) ",\"b\":" ONE("U8", "[3]", 8, 11) "}", 11);
    size_t n;
    char *whole = sft_read_file(test_path, &n);
    for (size_t cut = 0; cut < n; cut++) {
        SftSafetensors f = {.map = sft_alloc(cut), .bytes = cut};
        memcpy((char *)f.map, whole, cut);
        char *map = (char *)f.map, *wrong = sft__safetensors_parse(&f);
        assert_non_null(wrong);
        sft_safetensors_close(&f);
        free(wrong), free(map);
    }
    free(whole);
}

static void fill_with_numbers(void *arg, int64_t i, int64_t first, int64_t rows, void *out) {
    int64_t *next = arg; // rows come in order, each once
    assert_int_equal(i, 1);
    assert_int_equal(first, *next);
    *next += rows;
    for (int64_t r = 0; r < rows * 1000; r++) ((float *)out)[r] = (float)(first * 1000 + r);
}

static void written_files_read_back(void **state) {
    (void)state;
    const int64_t rows = 3000; // 12 MB: several pieces
    int64_t next = 0, numbers[] = {1, -2, 3};
    SftFileTensor t[] = {{.name = "numbers", .dtype = "I64", .dims = 1, .dim = {3}, .data = (char *)numbers},
                         {.name = "long", .dtype = "F32", .dims = 2, .dim = {rows, 1000}},
                         {.name = "none", .dtype = "F32", .dims = 1, .dim = {0}},
                         {.name = "half", .dtype = "F16", .dims = 0, .data = "\0\74"}};
    json_t *metadata = json_pack("{s:s}", "format", "pt");
    sft_safetensors_write(test_path, t, 4, metadata, fill_with_numbers, &next);
    json_decref(metadata);
    assert_int_equal(next, rows);
    SftSafetensors f = sft_safetensors_open(test_path);
    assert_int_equal(f.n, 4);
    assert_int_equal((f.tensor[0].data - f.map) % 2, 0);
    assert_string_equal(json_string_value(json_object_get(json_object_get(f.header, "__metadata__"), "format")), "pt");
    const SftFileTensor *in = sft_safetensors_find(&f, "numbers");
    assert_memory_equal(in->data, numbers, sizeof numbers);
    assert_int_equal((in->data - f.map) % 8, 0);
    in = sft_safetensors_find(&f, "long");
    for (int64_t i = 0; i < rows * 1000; i++) assert_true(((const float *)in->data)[i] == (float)i);
    assert_memory_equal(sft_safetensors_find(&f, "half")->data, "\0\74", 2);
    sft_safetensors_close(&f);
    t[1].name = "numbers";
    EXPECT_ERROR(sft_safetensors_write(test_path, t, 4, NULL, NULL, NULL), "its name comes twice");
    EXPECT_ERROR(sft_safetensors_write("/nowhere/x", t, 1, NULL, NULL, NULL), "/nowhere/x");
    assert_int_equal(test__status, SFT_BROKEN);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(good_files_open), cmocka_unit_test(bad_files_are_refused),
                                       cmocka_unit_test(cut_files_are_refused),
                                       cmocka_unit_test(written_files_read_back)};
    return cmocka_run_group_tests(tests, make_folder, remove_folder) != 0;
}
