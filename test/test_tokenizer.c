// The tokenizer: ids and text equal to those of Hugging Face tokenizers and SentencePiece, on the files in
// golden/tokenizer (made by golden/make_tokenizer.py from real tokenizers and from made-up ones); errors of malformed
// files; threads.
#include "test.h"
#include <dirent.h>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/lsan_interface.h>
#else
static void __lsan_disable(void) {}
static void __lsan_enable(void) {}
#endif

#define GOLDEN "test/golden/tokenizer/"

static void check_ids(const char *name, const char *text, const SftIds *got, const int32_t *ids, int64_t n) {
    if (got->n == n && (!n || !memcmp(got->ids, ids, (size_t)n * 4))) return;
    fprintf(stderr, "%s: \"%s\": got", name, text);
    for (int64_t i = 0; i < got->n; i++) fprintf(stderr, " %d", got->ids[i]);
    fprintf(stderr, "; expected");
    for (int64_t i = 0; i < n; i++) fprintf(stderr, " %d", ids[i]);
    fprintf(stderr, "\n");
    fail_msg("%s: ids of \"%s\" differ", name, text);
}

static size_t unhex(char *out, const char *hex, size_t digits) {
    for (size_t i = 0; i + 1 < digits; i += 2) {
        unsigned byte;
        sscanf(hex + i, "%2x", &byte);
        out[i / 2] = (char)byte;
    }
    out[digits / 2] = 0;
    return digits / 2;
}

// A line of cases.txt: text in hex, ids, and two decodings ("=": the text as decoded from UTF-8, else hex).
static void check_line(const SftTokenizer *t, const char *name, char *line) {
    char *column[4], *end;
    for (int i = 0; i < 4; i++) column[i] = strsep(&line, "\t");
    assert_non_null(column[3]);
    char *text = malloc(strlen(column[0]) + 1), *expected = malloc(strlen(column[0]) * 3 + 40000);
    size_t n = unhex(text, column[0], strlen(column[0]));
    SftIds got = {0}, ids = {0};
    for (char *p = column[1]; *p; p = *end ? end + 1 : end) {
        ids.ids = sft_realloc(ids.ids, (size_t)(ids.n + 1) * 4);
        ids.ids[ids.n++] = (int32_t)strtol(p, &end, 10);
    }
    sft_encode(t, &got, text, n, true);
    check_ids(name, column[0], &got, ids.ids, ids.n);
    for (int keep = 0; keep < 2; keep++) {
        if (!strcmp(column[2 + keep], "-")) continue;
        size_t bytes, want = n;
        char *decoded = sft_decode(t, ids.ids, ids.n, !keep, &bytes);
        if (strcmp(column[2 + keep], "=")) want = unhex(expected, column[2 + keep], strlen(column[2 + keep]));
        else memcpy(expected, text, n + 1);
        bool equal = bytes == want && !memcmp(decoded, expected, want);
        if (!equal && !strcmp(column[2 + keep], "=")) { // "=" of invalid UTF-8 means: with U+FFFD
            for (size_t i = 0; i < n && !equal; i++) equal = (text[i] & 0x80) != 0 && strstr(decoded, "\xef\xbf\xbd");
        }
        if (!equal) fail_msg("%s: decoding of %s differs: %s", name, column[0], decoded);
        free(decoded);
    }
    free(text), free(expected), free(got.ids), free(ids.ids);
}

static void real_tokenizers_give_the_same_ids(void **state) {
    (void)state;
    static const char *const names[] = {"llama3",  "qwen3", "deepseek_v3",  "llama2",       "mistral",
                                        "smollm2", "gpt2",  "llama2_model", "sentencepiece"};
    for (int i = 0; i < SFT_COUNT(names); i++) {
        char folder[4096], path[4096];
        SftTokenizer *t = sft_tokenizer_load(sft_path(folder, GOLDEN, names[i]));
        char *cases = sft_read_file(sft_path(path, folder, "cases.txt"), NULL), *rest = cases, *line;
        int n = 0;
        for (; (line = strsep(&rest, "\n")) && rest; n++) check_line(t, names[i], line);
        assert_true(n > 50);
        free(cases);
        sft_tokenizer_free(t);
    }
}

// A new folder with a tokenizer.json, or what `name` says; the path lies in a static buffer.
static char *made_folder(const char *name, const char *data, size_t n) {
    static char folder[64];
    char path[4096];
    snprintf(folder, sizeof folder, "/tmp/sft_tokenizer_XXXXXX");
    assert_non_null(mkdtemp(folder));
    sft_write_file(sft_path(path, folder, name), data, n);
    return folder;
}

static void remove_folder(const char *folder) {
    char path[4096];
    DIR *d = opendir(folder);
    for (struct dirent *e; d && (e = readdir(d));)
        if (e->d_name[0] != '.') unlink(sft_path(path, folder, e->d_name));
    closedir(d);
    rmdir(folder);
}

static void every_component_equals_the_reference(void **state) {
    (void)state;
    json_t *all = sft_json_file(GOLDEN "synthetic.json"), *one, *row;
    size_t i, k;
    assert_true(json_array_size(all) > 80);
    json_array_foreach(all, i, one) {
        const char *name = json_string_value(json_object_get(one, "name"));
        char *text = json_dumps(json_object_get(one, "tokenizer"), 0),
             *folder = made_folder("tokenizer.json", text, strlen(text));
        SftTokenizer *t = sft_tokenizer_load(folder);
        json_array_foreach(json_object_get(one, "cases"), k, row) {
            const char *input = json_string_value(json_array_get(row, 0));
            json_t *ids = json_array_get(row, 1);
            int32_t expected[400];
            int64_t n = (int64_t)json_array_size(ids);
            for (int64_t j = 0; j < n; j++) expected[j] = (int32_t)json_integer_value(json_array_get(ids, (size_t)j));
            SftIds got = {0};
            sft_encode(t, &got, input, strlen(input), true);
            check_ids(name, input, &got, expected, n);
            for (int keep = 0; keep < 2 && json_array_size(row) > 2; keep++) {
                char *decoded = sft_decode(t, expected, n, !keep, NULL);
                const char *want = json_string_value(json_array_get(row, 2 + (size_t)keep));
                if (strcmp(decoded, want))
                    fail_msg("%s: \"%s\" decodes to \"%s\", expected \"%s\"", name, input, decoded, want);
                free(decoded);
            }
            free(got.ids);
        }
        sft_tokenizer_free(t);
        remove_folder(folder);
        free(text);
    }
    json_decref(all);
}

// A minimal tokenizer.json with one part replaced. What is said of it, and where, must be in the error.
static void expect_refused(const char *json, size_t n, const char *words) {
    char *folder = made_folder("tokenizer.json", json, n);
    __lsan_disable(); // a load that ends in an error leaves its memory to the end of the program
    EXPECT_ERROR(sft_tokenizer_load(folder), words);
    __lsan_enable();
    remove_folder(folder);
}

static void malformed_files_are_refused(void **state) {
    (void)state;
#define MODEL(vocab, merges) "{\"model\":{\"type\":\"BPE\",\"vocab\":" vocab ",\"merges\":" merges "}}"
#define WITH(part) "{\"model\":{\"vocab\":{\"a\":0,\"b\":1,\"ab\":2},\"merges\":[\"a b\"]}," part "}"
    static const char *const cases[][2] = {
        {"", "line 1"},
        {"[]", "no \"model\""},
        {"{\"model\":{\"type\":\"Unigram\"}}", "Unigram"},
        {MODEL("[]", "[]"), "vocab"},
        {MODEL("{\"a\":-1}", "[]"), "id of \"a\""},
        {MODEL("{\"a\":1e3}", "[]"), "id of \"a\""},
        {MODEL("{\"a\":4000000000}", "[]"), "id of \"a\""},
        {MODEL("{\"a\":\"0\"}", "[]"), "id of \"a\""},
        {MODEL("{\"a\":0,\"b\":0}", "[]"), "same id 0"},
        {MODEL("{\"a\":0,\"a\":1}", "[]"), "duplicate"},
        {MODEL("{\"a\":0}", "{}"), "\"merges\" must be a list"},
        {MODEL("{\"a\":0,\"b\":1}", "[\"a b\"]"), "merge 1 (\"a\" \"b\"): \"ab\" is not"},
        {MODEL("{\"a\":0,\"b\":1}", "[\"a c\"]"), "\"c\" is not"},
        {MODEL("{\"a\":0}", "[\"a\"]"), "merge 1"},
        {MODEL("{\"a\":0}", "[\"a a a\"]"), "merge 1"},
        {MODEL("{\"a\":0}", "[[\"a\"]]"), "merge 1"},
        {MODEL("{\"a\":0}", "[7]"), "merge 1"},
        {WITH("\"normalizer\":{\"type\":\"Precompiled\"}"), "normalizer \"Precompiled\" is not supported"},
        {WITH("\"normalizer\":[]"), "\"normalizer\" must be an object"},
        {WITH("\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[7]}"), "\"type\""},
        {WITH("\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}"), "UnicodeScripts"},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(\"},\"behavior\":\"Isolated\"}"),
         "regular expression \"(\""},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Sideways\"}"),
         "Sideways"},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a[bc]]\"},\"behavior\":\"Isolated\"}"),
         "class inside a class"},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"[a&&b]\"},\"behavior\":\"Isolated\"}"),
         "&&"},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"\\\\C\"},\"behavior\":\"Isolated\"}"),
         "\\C"},
        {WITH("\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(*UTF)\"},\"behavior\":\"Isolated\"}"),
         "(*"},
        {WITH("\"decoder\":{\"type\":\"CTC\"}"), "decoder \"CTC\""},
        {WITH("\"post_processor\":{\"type\":\"BertProcessing\"}"), "BertProcessing"},
        {WITH("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[],\"special_tokens\":{}}"),
         "no Sequence"},
        {WITH("\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"x\"}}],"
              "\"special_tokens\":{\"x\":{\"ids\":[9]}}}"),
         "id 9"},
        {WITH("\"added_tokens\":[{\"id\":0,\"content\":\"x\"}]"), "has id 0, which is \"a\""},
        {WITH("\"added_tokens\":[{\"id\":9,\"content\":\"a\"}]"), "the vocabulary says 0"},
        {WITH("\"added_tokens\":[{\"id\":9,\"content\":\"\"}]"), "is empty"},
        {WITH("\"added_tokens\":[{\"id\":9,\"content\":\"x\"},{\"id\":9,\"content\":\"x\"}]"), "comes twice"},
        {WITH("\"added_tokens\":[{\"id\":16777216,\"content\":\"x\"}]"), "id of \"x\""},
        {WITH("\"added_tokens\":[7]"), "content"},
    };
    for (int i = 0; i < SFT_COUNT(cases); i++) expect_refused(cases[i][0], strlen(cases[i][0]), cases[i][1]);
    // a piece that ends in its score
    const char *folder = made_folder("tokenizer.model", "\x0a\x05\x0a\x01" "a\x15\x00", 7);
    __lsan_disable();
    EXPECT_ERROR(sft_tokenizer_load(folder), "not a SentencePiece model");
    EXPECT_ERROR(sft_tokenizer_load("test"), "has no tokenizer");
    __lsan_enable();
    remove_folder(folder);
}

// A regex that takes exponential time meets a limit, not the end of patience.
static void hopeless_regexes_end(void **state) {
    (void)state;
    char json[] = WITH(
        "\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a|aa|b?)+[cd]\"},\"behavior\":\"Isolated\"}");
    char text[400];
    char *folder = made_folder("tokenizer.json", json, strlen(json));
    SftTokenizer *t = sft_tokenizer_load(folder);
    SftIds ids = {0};
    memset(text, 'a', sizeof text);
    __lsan_disable();
    EXPECT_ERROR(sft_encode(t, &ids, text, sizeof text, false), "regular expression");
    __lsan_enable();
    free(ids.ids);
    sft_tokenizer_free(t);
    remove_folder(folder);
}

static void configuration_names_bos_eos_and_template(void **state) {
    (void)state;
    char path[4096];
    const char json[] = "{\"model\":{\"vocab\":{\"a\":0,\"<s>\":1,\"</s>\":2},\"merges\":[]}}";
    static const char *const configs[] = {
        "{\"bos_token\":\"<s>\",\"eos_token\":{\"content\":\"</"
        "s>\"},\"add_bos_token\":true,\"model_max_length\":1000000000000000019884624838656,\"chat_template\":\"T\"}",
        "{\"bos_token\":null,\"eos_token\":\"</"
        "s>\",\"add_eos_token\":true,\"chat_template\":[{\"name\":\"x\",\"template\":\"X\"},{\"name\":\"default\","
        "\"template\":\"D\"}]}"};
    for (int i = 0; i < 3; i++) {
        char *folder = made_folder("tokenizer.json", json, strlen(json));
        if (i < 2) sft_write_file(sft_path(path, folder, "tokenizer_config.json"), configs[i], strlen(configs[i]));
        if (i == 1) sft_write_file(sft_path(path, folder, "chat_template.jinja"), "J", 1);
        SftTokenizer *t = sft_tokenizer_load(folder);
        SftIds ids = {0};
        sft_encode(t, &ids, "a<s></s>", 8, true);
        // -1: "<s>" is no token here but three unknown letters
        static const int32_t expected[3][4] = {{1, 0, 1, 2}, {0, -1, 2, 2}, {0}};
        if (i == 0) check_ids("config", "a<s></s>", &ids, expected[0], 4);
        if (i == 1) assert_int_equal(ids.ids[ids.n - 1], 2), assert_int_equal(ids.ids[ids.n - 2], 2);
        if (i == 2) check_ids("config", "a<s></s>", &ids, expected[2], 1);
        assert_int_equal(sft_bos(t), i == 0 ? 1 : -1);
        assert_int_equal(sft_eos(t), i < 2 ? 2 : -1);
        assert_int_equal(sft_adds_bos(t), i == 0);
        if (i == 2) assert_null(sft_chat_template(t));
        else assert_string_equal(sft_chat_template(t), i ? "J" : "T");
        assert_int_equal(sft_vocab_size(t), 3);
        assert_int_equal(sft_token_id(t, "</s>"), 2);
        assert_int_equal(sft_token_id(t, "nothing"), -1);
        assert_string_equal(sft_token_text(t, 1), "<s>");
        assert_null(sft_token_text(t, 3));
        assert_null(sft_token_text(t, -1));
        free(ids.ids);
        sft_tokenizer_free(t);
        remove_folder(folder);
    }
}

// Threads share a tokenizer; what each remembers of earlier words changes nothing.
static void threads_and_order_change_nothing(void **state) {
    (void)state;
    char path[4096];
    SftTokenizer *t = sft_tokenizer_load(GOLDEN "qwen3");
    size_t n;
    char *text = sft_read_file(sft_path(path, GOLDEN, "synthetic.json"), &n);
    n = SFT_MIN(n, 40000);
    SftIds whole = {0};
    sft_encode(t, &whole, text, n, false);
    bool equal = true;
#pragma omp parallel for num_threads(8) schedule(dynamic)
    for (int i = 0; i < 64; i++) {
        SftIds ids = {0};
        sft_encode(t, &ids, text + i * 500, 500, false); // fills the caches with other words
        ids.n = 0;
        sft_encode(t, &ids, text, n, false);
        if (ids.n != whole.n || memcmp(ids.ids, whole.ids, (size_t)ids.n * 4)) {
#pragma omp atomic write
            equal = false;
        }
        free(ids.ids);
    }
    assert_true(equal);
    free(text), free(whole.ids);
    sft_tokenizer_free(t);
}

// Loads and uses what stands in the folder; false where that ends in an error.
static bool survives(const char *folder) {
    const char *text = "Hello  world 123 \xe4\xbd\xa0 <s> \xff x";
    static SftTokenizer *t; // static: kept over the jump
    volatile bool good = false;
    t = NULL;
    sft_die_hook = test__hook;
    __lsan_disable();
    if (!setjmp(test__escape)) {
        t = sft_tokenizer_load(folder);
        SftIds ids = {0};
        sft_encode(t, &ids, text, strlen(text), true);
        free(sft_decode(t, ids.ids, ids.n, false, NULL));
        free(ids.ids);
        good = true;
    }
    __lsan_enable();
    sft_die_hook = NULL;
    sft_tokenizer_free(t);
    return good;
}

// Flips bytes of small tokenizer files: every outcome but a crash or a hang is fine.
static void damaged_files_do_no_harm(void **state) {
    (void)state;
    static const char *const files[][2] = {
        {"llama2_model", "tokenizer.model"}, {"gpt2", "vocab.bpe"}, {"smollm2", "tokenizer.json"}};
    for (int f = 0, loaded = 0; f < 3; f++) {
        char source[4096], path[4096];
        size_t n, m;
        char *data = sft_read_file(sft_path(path, sft_path(source, GOLDEN, files[f][0]), files[f][1]), &n),
             *vocab = NULL;
        if (f == 1) vocab = sft_read_file(sft_path(path, source, "encoder.json"), &m);
        for (uint64_t k = 0; k < 60; k++) {
            uint64_t r = sft_random(7, (uint64_t)f, 0, k);
            size_t at = k % 2 ? r % SFT_MIN(n, 600) : r % n, length = k % 3 ? n : n - at;
            char old = data[at];
            data[at] = (char)(r >> 32);
            char *folder = made_folder(files[f][1], data, length);
            if (vocab) sft_write_file(sft_path(path, folder, "encoder.json"), vocab, m);
            data[at] = old;
            loaded += survives(folder);
            remove_folder(folder);
        }
        if (f == 2) assert_true(loaded > 10 && loaded < 170); // both ways are taken
        free(data), free(vocab);
    }
}

SFT_TEST_MAIN(cmocka_unit_test(real_tokenizers_give_the_same_ids),
              cmocka_unit_test(every_component_equals_the_reference), cmocka_unit_test(malformed_files_are_refused),
              cmocka_unit_test(hopeless_regexes_end), cmocka_unit_test(configuration_names_bos_eos_and_template),
              cmocka_unit_test(threads_and_order_change_nothing), cmocka_unit_test(damaged_files_do_no_harm))
