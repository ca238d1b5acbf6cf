// [3] data: formats, masks, errors, truncation, packing, batches, split, order, reports.
// The tokenizer is test/golden/template_bytes.json: a token is a byte or a special token, so samples are easy to read.
#include "test.h"

static char folder[64], path[4096];
static SftTokenizer *tok;
static SftTemplate *tpl;

static int setup(void **state) {
    (void)state;
    strcpy(folder, "/tmp/sft_data_XXXXXX");
    assert_non_null(mkdtemp(folder));
    size_t n;
    char *text = sft_read_file("test/golden/template_bytes.json", &n);
    sft_write_file(sft_path(path, folder, "tokenizer.json"), text, n);
    const char *config = "{\"eos_token\": \"<|endoftext|>\", \"bos_token\": \"<s>\", \"add_bos_token\": false}";
    sft_write_file(sft_path(path, folder, "tokenizer_config.json"), config, strlen(config));
    free(text);
    tok = sft_tokenizer_load(folder);
    json_t *plain = json_loads("{\"system\": \"({system})\", \"user\": \"{user}>\", \"assistant\": \"{assistant}\", "
                               "\"stop\": \"<|end|>\", \"tool\": \"/{tool}/\"}",
                               0, NULL);
    tpl = sft_template(tok, NULL, plain);
    json_decref(plain);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    sft_template_free(tpl), sft_tokenizer_free(tok);
    return 0;
}

static SftConfig config_of(const char *option, ...) { // "--key", "value", ..., NULL
    char *argv[64] = {"train_gpt2", "data", "--model_name_or_path", "x", "--train_file", "x"};
    int argc = 6;
    va_list args;
    va_start(args, option);
    for (const char *a = option; a; a = va_arg(args, const char *)) argv[argc++] = (char *)a;
    va_end(args);
    return sft_config(argc, argv);
}
static const char *file(const char *name, const char *text) {
    sft_write_file(sft_path(path, folder, name), text, strlen(text));
    return path;
}
static SftDataset read_text(const SftConfig *c, const char *name, const char *text) {
    json_t *files = json_string(file(name, text));
    SftDataset d = sft_dataset(c, tok, tpl, files);
    json_decref(files);
    return d;
}
static char *shown(const SftDataset *d) { // all samples: trained tokens in [ ], a bar after each sample
    char *all = strdup("");
    for (int64_t s = 0; s < d->samples; s++) {
        for (int64_t i = d->sample[s].begin, stop = i + d->sample[s].n, end; i < stop; i = end) {
            for (end = i; end < stop && d->tokens.trained[end] == d->tokens.trained[i]; end++) {}
            char *text = sft_decode(tok, d->tokens.ids + i, end - i, false, NULL);
            char *longer = sft_format(d->tokens.trained[i] ? "%s[%s]" : "%s%s", all, text);
            free(all), free(text), all = longer;
        }
        char *longer = sft_format("%s|", all);
        free(all), all = longer;
    }
    return all;
}
#define READS(text, expected, ...) READS_FILE("rows.json", text, expected, __VA_ARGS__)
#define READS_FILE(name, text, expected, ...)                                                                          \
    do {                                                                                                               \
        SftConfig c_ = config_of(__VA_ARGS__);                                                                         \
        SftDataset d_ = read_text(&c_, name, text);                                                                    \
        char *got_ = shown(&d_);                                                                                       \
        assert_string_equal(got_, expected);                                                                           \
        free(got_), sft_dataset_free(&d_), sft_config_free(&c_);                                                       \
    } while (0)
#define REFUSES(text, words, ...)                                                                                      \
    do {                                                                                                               \
        SftConfig c_ = config_of(__VA_ARGS__);                                                                         \
        EXPECT_ERROR(read_text(&c_, "rows.json", text), words);                                                        \
        sft_config_free(&c_);                                                                                          \
    } while (0)

static void every_format(void **state) {
    (void)state;
    READS("[{\"instruction\": \"a\", \"input\": \"\", \"output\": \"b\"}, {\"instruction\": \"a\", \"input\": \"i\", "
          "\"output\": \"b\"}]",
          "a>[b<|end|>]|a\ni>[b<|end|>]|", NULL);
    READS("[{\"instruction\": \"a\", \"input\": null, \"output\": \"b\", \"system\": \"s\", \"history\": [[\"q\", "
          "\"r\"]]}]",
          "(s)q>[r<|end|>]a>[b<|end|>]|", NULL);
    READS("[{\"input\": \"a\", \"output\": \"b\"}]", "a>[b<|end|>]|", NULL);
    READS("[{\"instruction\": \"a\", \"output\": \"<nooutput>\"}, {\"instruction\": \"a\", \"output\": \"b\"}]",
          "a>[b<|end|>]|", NULL);
    READS("{\"messages\": [{\"role\": \"system\", \"content\": \"s\"}, {\"role\": \"user\", \"content\": \"a\"}, "
          "{\"role\": \"assistant\", \"content\": \"b\"}]}",
          "(s)a>[b<|end|>]|", NULL);
    READS("{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"value\": \"a\"}, {\"type\": "
          "\"text\", \"text\": \"c\"}]}, {\"role\": \"assistant\", \"content\": \"b\"}]}",
          "ac>[b<|end|>]|", NULL);
    READS("{\"conversation\": [{\"system\": \"s\", \"input\": \"a\", \"output\": \"b\"}, {\"input\": \"c\", "
          "\"output\": \"d\"}]}",
          "(s)a>[b<|end|>]c>[d<|end|>]|", NULL);
    READS("{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}, {\"from\": \"function_call\", \"value\": "
          "\"f\"}, {\"from\": \"observation\", \"value\": \"o\"}, {\"from\": \"gpt\", \"value\": \"b\"}], \"system\": "
          "\"s\"}",
          "(s)a>[f<|end|>]/o/[b<|end|>]|", NULL);
    READS("{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": [{\"role\": \"user\", \"content\": \"c\"}], "
          "\"completion\": [{\"role\": \"assistant\", \"content\": \"d\"}]}",
          "a>[b<|end|>]|c>[d<|end|>]|", NULL);
    READS("{\"text\": \"one\"}\n{\"text\": \"two\", \"url\": \"x\"}", "[one<|endoftext|>]|[two<|endoftext|>]|", NULL);
    READS("{\"query\": \"a\", \"response\": \"b\"}", "a>[b<|end|>]|", "--columns",
          "{\"query\": \"user\", \"response\": \"assistant\"}", NULL);
    READS("{\"text\": \"no\", \"instruction\": \"a\", \"output\": \"b\"}", "[no<|endoftext|>]|", "--dataset_format",
          "text", NULL);
    READS("{\"conversations\": [{\"from\": \"human\", \"value\": \"a\"}], \"chosen\": {\"from\": \"gpt\", \"value\": "
          "\"b\"}, \"rejected\": {\"from\": \"gpt\", \"value\": \"c\"}}",
          "a>[b<|end|>]|", NULL);
}

static void every_shape_of_file(void **state) {
    (void)state;
    const char *two = "[one<|endoftext|>]|[two<|endoftext|>]|";
    READS_FILE("x.jsonl", "[{\"text\": \"one\"},\n {\"text\": \"two\"}]\n", two, NULL); // an array, whatever the name
    READS_FILE("x.json", "\xef\xbb\xbf{\"text\": \"one\"}\r\n\r\n{\"text\": \"two\"}\r\n", two,
               NULL);                                                                   // lines, byte order mark, CRLF
    READS_FILE("x.json", "{\n\"text\":\n\"one\"\n}\n{\n\"text\": \"two\"}", two, NULL); // objects over several lines
    READS_FILE("x.txt", "one\n\n  \ntwo\n", two, NULL);
    READS_FILE("x.txt", "one\r\ntwo", two, NULL);
    READS_FILE("x.txt", "{\"text\": \"one\"}\n{\"text\": \"two\"}\n", two, NULL); // JSON in a file called .txt
    READS_FILE("x.txt", "[1] a note\n", "[[1] a note<|endoftext|>]|", NULL);
    READS_FILE("x.json", "[{\"text\": \"]},{\\\"[\"}]", "[]},{\"[<|endoftext|>]|",
               NULL); // brackets and quotes inside strings
    READS_FILE("x.md", "plain words", "[plain words<|endoftext|>]|", "--dataset_format", "text", NULL);
}

static void masks(void **state) {
    (void)state;
#define TALK(a, b)                                                                                                     \
    "{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"assistant\", \"content\": \"r\"" a         \
    "}, {\"role\": \"user\", \"content\": \"s\"}, {\"role\": \"assistant\", \"content\": \"t\"" b "}]}"
    const char *second = "q>r<|end|>s>[t<|end|>]|", *both = "q>[r<|end|>]s>[t<|end|>]|";
    READS(TALK("", ""), both, NULL);
    READS(TALK(", \"loss\": false", ", \"loss\": true"), second, NULL);
    READS(TALK(", \"loss\": \"False\"", ""), second, NULL);
    READS(TALK(", \"loss\": null", ", \"loss\": \"True\""), both, NULL);
    READS(TALK(", \"loss_weight\": 0.0", ", \"loss_weight\": 1.0"), second, NULL);
    READS(TALK("", ""), second, "--mask_history", NULL);
    READS(TALK("", ""), "[q>r<|end|>s>t<|end|>]|", "--train_on_prompt", NULL);
    READS("{\"conversation\": [{\"input\": \"q\", \"output\": \"r\", \"output_with_loss\": false}, {\"input\": \"s\", "
          "\"output\": \"t\"}]}",
          second, NULL);
    READS("{\"messages\": [{\"role\": \"user\", \"content\": \"q\", \"loss\": true}, {\"role\": \"assistant\", "
          "\"content\": \"r\"}]}",
          "q>[r<|end|>]|", NULL); // as XTuner: never the user
}

static void prompts(void **state) { // messages are read as those of rows, and end where the answer begins
    (void)state;
    static const char *const good[][2] = {
        {"\"q\"", "(be kind)q>"},
        {"{\"prompt\": \"q\"}", "(be kind)q>"},
        {"[{\"role\": \"user\", \"content\": \"q\"}, {\"from\": \"gpt\", \"value\": \"r\"}, {\"role\": \"user\", "
         "\"content\": [{\"type\": \"text\", \"text\": \"s\"}]}]", "(be kind)q>r<|end|>s>"},
        {"{\"messages\": [{\"role\": \"user\", \"content\": \"q\"}]}", "(be kind)q>"},
    };
    static const char *const wrong[][2] = {
        {"{\"a\": 1}", "line 7: a prompt is a string or a list of messages"},
        {"5", "line 7: a prompt is a string or a list of messages"},
        {"[{\"role\": \"user\", \"content\": \"q\"}, {\"role\": \"user\"}]", "line 7, message 2: expected \"content\""},
        {"[{\"role\": \"boss\", \"content\": \"q\"}]", "line 7, message 1: unknown role \"boss\""},
    };
    SftConfig c = config_of("--system", "be kind", NULL);
    for (int i = 0; i < SFT_COUNT(good); i++) {
        json_t *prompt = json_loads(good[i][0], JSON_DECODE_ANY, NULL);
        SftIds ids = sft_prompt(&c, tok, tpl, prompt, "line 7");
        char *text = sft_decode(tok, ids.ids, ids.n, false, NULL);
        assert_string_equal(text, good[i][1]);
        free(text), free(ids.ids), json_decref(prompt);
    }
    for (int i = 0; i < SFT_COUNT(wrong); i++) {
        json_t *prompt = json_loads(wrong[i][0], JSON_DECODE_ANY, NULL);
        EXPECT_ERROR(sft_prompt(&c, tok, tpl, prompt, "line 7"), wrong[i][1]);
        json_decref(prompt);
    }
    c.raw = true; // no template, no system text
    json_t *prompt = json_string("q");
    SftIds ids = sft_prompt(&c, tok, tpl, prompt, "line 7");
    assert_int_equal(ids.n, 1);
    free(ids.ids), json_decref(prompt), sft_config_free(&c);
}

static void malformed_rows(void **state) {
    (void)state;
    const char *good = "{\"prompt\": \"a\", \"completion\": \"b\"}";
    char *text = sft_format("%s\n{\"prompt\": \"a\", \"completion\": False}\n%s\n", good, good);
    REFUSES(text, "rows.json, line 2, column 36: invalid token near", NULL);
    READS(text, "a>[b<|end|>]|a>[b<|end|>]|", "--on_bad_row", "skip", NULL);
    free(text);
    REFUSES("[{\"text\": \"a\"},\n ]", "line 2, column 2: expected a row after the comma", NULL);
    REFUSES("[{\"text\": \"a\"}\n {\"text\": \"b\"}]", "line 2, column 2: expected , or ]", NULL);
    REFUSES("[{\"text\": \"a\"}", "line 1, column 15: the file ends inside the JSON array", NULL);
    REFUSES("[\n{\"text\": \"a}]", "line 2, column 1: the row that begins here does not end", NULL);
    REFUSES("[{\"text\": \"a\"}] x", "column 17: expected the end of the file", NULL);
    REFUSES("[1]", "line 1, column 2: expected a row {...}", NULL);
    REFUSES("{\"text\": \"a\", \"text\": \"b\"}", "duplicate object key", NULL);
    REFUSES("{\"a\": 1, \"b\": 2}", "got a, b", NULL);
    REFUSES("{\"instruction\": \"a\"}", "expected the columns of a known format", NULL);
    REFUSES("{\"prompt\": 1, \"completion\": \"b\"}", "expected \"prompt\" to be a string", NULL);
    REFUSES("{\"messages\": [{\"role\": \"boss\", \"content\": \"b\"}]}", "unknown role \"boss\"", NULL);
    REFUSES("{\"messages\": [{\"role\": \"user\"}]}", "\"content\" to be a string, it is missing", NULL);
    REFUSES("{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image\", \"url\": \"x\"}]}]}",
            "parts of type text", NULL);
    REFUSES("{\"messages\": [{\"role\": \"assistant\", \"content\": \"b\", \"loss\": 3}]}",
            "\"loss\" to be true or false", NULL);
    REFUSES("PAR1", "expected a JSON array", NULL);
    REFUSES("", "0 rows read", NULL);
    REFUSES("{\"prompt\": \"a\", \"completion\": \"b\"}", "is mapped to usr; expected one of user, assistant",
            "--columns", "{\"x\": \"usr\"}", NULL);
    REFUSES("{\"prompt\": \"123456789\", \"completion\": \"b\"}",
            "no row has a trained token left: 1 rows read, 0 without text, 1 with no trained token in their first 8",
            "--max_length", "8", NULL);
}

static void long_rows(void **state) {
    (void)state;
    const char *rows = "{\"prompt\": \"a\", \"completion\": \"bcdefghi\"}\n{\"prompt\": \"a\", \"completion\": "
                       "\"b\"}\n{\"prompt\": \"abcdefgh\", \"completion\": \"b\"}";
    SftConfig c = config_of("--max_length", "6", NULL);
    SftDataset d = read_text(&c, "rows.json", rows);
    char *got = shown(&d);
    assert_string_equal(got, "a>[bcde]|a>[b<|end|>]|");
    assert_int_equal(d.report.truncated, 1), assert_int_equal(d.report.dropped_no_answer, 1),
        assert_int_equal(d.report.rows, 3);
    free(got), sft_dataset_free(&d), sft_config_free(&c);
    READS(rows, "a>[b<|end|>]|", "--max_length", "6", "--truncation_mode", "drop", NULL);
    REFUSES(rows, "line 1, column 1: this has 11 tokens, max_length is 6", "--max_length", "6", "--truncation_mode",
            "error", NULL);
    READS("{\"text\": \"abcdefgh\"}", "[abc]|[def]|[gh<|endoftext|>]|", "--max_length", "3", NULL); // nothing lost
    READS("{\"text\": \"abc\"}", "[abc]|[<|endoftext|>]|", "--max_length", "3", NULL);
}

static void files_weights_and_folders(void **state) {
    (void)state;
    char rows[4096] = "", name[64];
    for (int i = 0; i < 40; i++) sprintf(rows + strlen(rows), "{\"text\": \"%02d\"}\n", i);
    SftConfig c = config_of("--seed", "7", NULL);
    json_t *files = json_pack("[{s:s, s:f}]", "path", file("w.json", rows), "weight", 0.5);
    SftDataset half = sft_dataset(&c, tok, tpl, files), again = sft_dataset(&c, tok, tpl, files);
    assert_int_equal(half.samples, 20);
    assert_memory_equal(half.tokens.ids, again.tokens.ids, (size_t)half.tokens.n * 4);
    json_decref(files);
    files = json_pack("[s, {s:s, s:f}]", path, "path", path, "weight", 2.25);
    SftDataset more = sft_dataset(&c, tok, tpl, files);
    assert_int_equal(more.samples, 40 + 2 * 40 + 10);
    assert_int_equal(more.tokens.n, 2 * 40 * 3); // copies are the same tokens
    // Copies of a row go to the same side of a split.
    SftDataset validation;
    sft_dataset_split(&more, &validation, 0.2, 3);
    assert_true(validation.samples >= 26 && validation.samples <= 28);
    for (int64_t i = 0; i < validation.samples; i++)
        assert_memory_equal(validation.tokens.ids + validation.sample[i].begin + 2, (int32_t[]){sft_eos(tok)}, 4);
    sft_dataset_free(&half), sft_dataset_free(&again), sft_dataset_free(&more), sft_dataset_free(&validation),
        json_decref(files);
    char sub[4096];
    sft_make_folder(sft_path(sub, folder, "sub"));
    for (int i = 2; i >= 0; i--) { // read in the order of their names, other files left alone
        sprintf(name, "sub/%d.%s", i, i == 1 ? "csv" : "txt");
        file(name, i == 1 ? "a,b" : i == 0 ? "zero" : "two");
    }
    files = json_string(sub);
    SftDataset d = sft_dataset(&c, tok, tpl, files);
    char *got = shown(&d);
    assert_string_equal(got, "[zero<|endoftext|>]|[two<|endoftext|>]|");
    free(got), json_decref(files), sft_dataset_free(&d), sft_config_free(&c);
    READS(rows, "[00<|endoftext|>]|[01<|endoftext|>]|", "--max_samples", "2", NULL);
    c = config_of(NULL);
    json_t *bad = json_pack("{s:s, s:f}", "path", path, "weight", -1.0);
    EXPECT_ERROR(sft_dataset(&c, tok, tpl, bad), "weight");
    json_object_set_new(bad, "wieght", json_real(2)); // a misspelt weight would count as 1
    EXPECT_ERROR(sft_dataset(&c, tok, tpl, bad), "unknown key \"wieght\"; known: path|weight");
    json_decref(bad), sft_config_free(&c);
}

// A dataset of samples of these lengths; token i of sample s is 1000 * s + i, the first half of a sample untrained.
static SftDataset dataset_of(const int *lengths, int n) {
    SftDataset d = {.samples = n, .sample = SFT_NEW(SftSample, n), .rows_per_step = 1, .epochs = 1};
    int64_t total = 0;
    for (int s = 0; s < n; s++) total += lengths[s];
    d.tokens = (SftTokens){SFT_NEW(int32_t, total), SFT_NEW(uint8_t, total), total, total};
    for (int64_t s = 0, at = 0; s < n; at += lengths[s++]) {
        d.sample[s] = (SftSample){at, lengths[s], 0};
        for (int i = 0; i < lengths[s]; i++) {
            d.tokens.ids[at + i] = (int32_t)(1000 * s + i), d.tokens.trained[at + i] = i >= lengths[s] / 2;
            d.sample[s].trained += i > 0 && i >= lengths[s] / 2;
        }
    }
    d.report.tokens = total;
    return d;
}
static char *packs_of(const SftDataset *d) { // "4 | 3 1 | 2": lengths of the documents, pack by pack
    char *all = strdup("");
    for (int64_t p = 0; p < d->packs; p++)
        for (int64_t k = d->pack[p]; k < d->pack[p + 1]; k++) {
            const char *gap = k > d->pack[p] ? " " : p ? " | " : "";
            char *longer = sft_format("%s%s%d", all, gap, (int)d->document[d->order[k]].n);
            free(all), all = longer;
        }
    return all;
}

static void packs_of_trl(void **state) {
    (void)state;
    SftConfig c = config_of("--packing", "--max_length", "4", "--shuffle", "false", NULL);
    SftDataset d = dataset_of((int[]){4, 2, 3, 1}, 4); // the first was 5 long and has been cut
    sft_dataset_pack(&d, &c);
    char *got = packs_of(&d);
    assert_string_equal(got, "4 | 3 1 | 2");
    free(got), sft_dataset_free(&d), sft_config_free(&c);
    c = config_of("--packing", "--max_length", "4", "--shuffle", "false", "--packing_strategy", "wrapped", NULL);
    d = dataset_of((int[]){5, 2, 3, 1}, 4);
    sft_dataset_pack(&d, &c);
    got = packs_of(&d);
    assert_string_equal(got, "4 | 1 2 1 | 2 1");
    free(got), sft_dataset_free(&d), sft_config_free(&c);
}

// Best fit decreasing, written plainly: O(n^2), packs of equal free space in the order in which they got it.
static void best_fit_is_best_fit(void **state) {
    (void)state;
    for (int round = 0; round < 30; round++) {
        enum { N = 200 };
        int lengths[N], order[N], in[N], space[N], since[N], packs = 0, room = 5 + round * 7;
        for (int i = 0; i < N; i++)
            lengths[i] = 2 + (int)(sft_random(1, (uint64_t)round, 0, (uint64_t)i) % (uint64_t)(room - 1)), order[i] = i;
        for (int i = 0; i < N; i++) // stable insertion sort, longest first
            for (int j = i; j > 0 && lengths[order[j - 1]] < lengths[order[j]]; j--) {
                int t = order[j];
                order[j] = order[j - 1], order[j - 1] = t;
            }
        for (int k = 0; k < N; k++) {
            int best = -1, n = lengths[order[k]];
            for (int p = 0; p < packs; p++)
                if (space[p] >= n &&
                    (best < 0 || space[p] < space[best] || (space[p] == space[best] && since[p] < since[best])))
                    best = p;
            if (best < 0) best = packs++, space[best] = room;
            space[best] -= n, since[best] = k, in[order[k]] = best;
        }
        SftConfig c = config_of("--packing", NULL);
        c.max_length = room;
        SftDataset d = dataset_of(lengths, N);
        sft_dataset_pack(&d, &c);
        assert_int_equal(d.packs, packs);
        for (int64_t p = 0; p < d.packs; p++)
            for (int64_t k = d.pack[p]; k < d.pack[p + 1]; k++) assert_int_equal(in[d.order[k]], p);
        assert_true(d.longest <= room);
        sft_dataset_free(&d), sft_config_free(&c);
    }
}

static void batches_never_cross_documents(void **state) {
    (void)state;
    for (int wrapped = 0; wrapped < 2; wrapped++)
        for (int see = 0; see < 2; see++) {
            SftConfig c =
                config_of("--packing", "--max_length", "16", "--packing_strategy", wrapped ? "wrapped" : "bfd", NULL);
            int lengths[50], total = 0;
            for (int i = 0; i < 50; i++) total += lengths[i] = 2 + i % 13;
            SftDataset d = dataset_of(lengths, 50);
            d.documents_see_each_other = see;
            sft_dataset_pack(&d, &c);
            SftBatch b = {0};
            int64_t seen = 0, trained = 0;
            for (int64_t p = 0; p < d.packs; p += 3) {
                int64_t three[3] = {p, p + 1, p + 2}, n = SFT_MIN(3, d.packs - p);
                sft_batch_fill(&b, &d, three, n);
                seen += b.n;
                int64_t documents = 0;
                for (int64_t i = 0; i < b.n; i++) {
                    assert_true(b.begin[i] <= i && i < b.end[i] && b.end[i] <= b.n);
                    assert_int_equal(b.pos[i], i - b.begin[i]);
                    documents += b.begin[i] == i;
                    if (b.target[i] != -100)
                        assert_int_equal(b.target[i], b.ids[i] + 1), assert_int_equal(b.ids[i + 1], b.ids[i] + 1),
                            assert_true(i + 1 < b.end[i]);
                    if (!see && !wrapped && i + 1 < b.end[i])
                        assert_int_equal(b.target[i] != -100, b.ids[i + 1] % 1000 >= lengths[b.ids[i] / 1000] / 2);
                    trained += b.target[i] != -100;
                }
                assert_int_equal(documents, b.documents);
                if (see) assert_int_equal(documents, n);
            }
            assert_int_equal(seen, total); // no tail is lost
            assert_int_equal(trained, d.report.trained_tokens);
            sft_batch_fill(&b, &d, NULL, 0);
            assert_int_equal(b.n + b.trained + b.documents, 0);
            sft_batch_free(&b), sft_dataset_free(&d), sft_config_free(&c);
        }
}

static void orders_and_splits(void **state) {
    (void)state;
    enum { N = 1000 };
    static int lengths[N];
    static int64_t a[N], b[N], c[N];
    for (int i = 0; i < N; i++) lengths[i] = 2;
    SftConfig config = config_of(NULL);
    SftDataset d = dataset_of(lengths, N), validation;
    sft_dataset_split(&d, &validation, 0, 1);
    assert_int_equal(validation.samples, 0);
    sft_dataset_split(&d, &validation, 0.1, 1);
    assert_int_equal(validation.samples, 100), assert_int_equal(d.samples, 900);
    int left = 0; // chosen all over the file
    for (int i = 0; i < 100; i++) left += validation.tokens.ids[validation.sample[i].begin] / 1000 < N / 2;
    assert_true(left > 30 && left < 70);
    sft_dataset_free(&validation);
    EXPECT_ERROR(sft_dataset_split(&d, &validation, 900, 1), "would leave none");
    sft_dataset_split(&d, &validation, 25, 1);
    assert_int_equal(validation.samples, 25), assert_int_equal(d.samples, 875);
    sft_dataset_pack(&d, &config);
    assert_int_equal(sft_steps_per_epoch(&d, 8), 110);
    sft_epoch_order(a, &d, 42, 0, true), sft_epoch_order(b, &d, 42, 0, true), sft_epoch_order(c, &d, 42, 1, true);
    assert_memory_equal(a, b, 875 * sizeof *a);
    int same = 0, sum = 0;
    static bool seen[N];
    for (int i = 0; i < 875; i++) same += a[i] == c[i], sum += !seen[a[i]], seen[a[i]] = true;
    assert_int_equal(sum, 875);
    assert_true(same < 10); // a random permutation has one fixed place on average
    sft_epoch_order(a, &d, 42, 1, false);
    for (int i = 0; i < 875; i++) assert_int_equal(a[i], i);
    sft_dataset_free(&d), sft_dataset_free(&validation), sft_config_free(&config);
}

static void the_largest_batch_is_the_largest_of_the_run(void **state) {
    (void)state;
    enum { N = 101, ROWS = 3, PER_STEP = 6, STEPS = 40 }; // two epochs of 17 steps and a piece of the third
    static int lengths[N];
    for (int i = 0; i < N; i++) lengths[i] = 1 + (int)(sft_random(5, 0, 0, (uint64_t)i) % 40);
    SftConfig config = config_of(NULL);
    SftDataset d = dataset_of(lengths, N);
    sft_dataset_pack(&d, &config);
    assert_int_equal(sft_steps_per_epoch(&d, PER_STEP), 17);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        int64_t order[N], tokens = 0, targets = 0, most_tokens = 0, most_targets = 0;
        SftBatch b = {0};
        for (int64_t step = 0; step < STEPS; step++) { // as a run takes them
            int64_t first = step % 17 * PER_STEP, end = SFT_MIN(first + PER_STEP, d.packs);
            sft_epoch_order(order, &d, 7, step / 17, shuffle);
            for (int64_t at = first; at < end; at += ROWS) {
                sft_batch_fill(&b, &d, order + at, SFT_MIN(ROWS, end - at));
                tokens = SFT_MAX(tokens, b.n), targets = SFT_MAX(targets, b.trained);
            }
        }
        sft_largest_batch(&most_tokens, &most_targets, &d, ROWS, PER_STEP, STEPS, 7, shuffle);
        assert_int_equal(most_tokens, tokens), assert_int_equal(most_targets, targets);
        assert_true(tokens > 40 && targets < tokens);
        sft_batch_free(&b);
    }
    sft_dataset_free(&d), sft_config_free(&config);
}

static void reports(void **state) {
    (void)state;
    SftConfig c = config_of("--max_length", "6", NULL);
    SftDataset d = read_text(&c, "rows.json",
                             "{\"prompt\": \"a\", \"completion\": \"bcdefghi\"}\n{\"prompt\": \"a\", \"completion\": "
                             "\"b\"}\n{\"prompt\": \"a\", \"completion\": \"\"}");
    sft_dataset_pack(&d, &c);
    json_t *report = sft_data_json(&d);
    char *text = json_dumps(report, 0);
    assert_string_equal(text, "{\"rows\": 3, \"samples\": 2, \"dropped\": {\"malformed\": 0, \"empty\": 1, "
                              "\"no_trained_token\": 0, \"too_long\": 0}, \"truncated\": 1, \"cut\": 0, "
                              "\"packs\": 2, \"tokens\": 10, \"trained_tokens\": 6, \"steps_per_epoch\": 1}");
    free(text), json_decref(report);
    sft_data_dump(sft_path(path, folder, "dump.jsonl"), &d);
    text = sft_read_file(path, NULL);
    int32_t a = d.tokens.ids[0], more = d.tokens.ids[1], b = d.tokens.ids[2], end = sft_token_id(tok, "<|end|>");
    char *expected =
        sft_format("{\"input_ids\": [%d, %d, %d, %d], \"labels\": [-100, -100, %d, %d]}\n", a, more, b, end, b, end);
    assert_non_null(strstr(text, expected));
    free(text), free(expected);
    FILE *out = fopen(sft_path(path, folder, "shown"), "w");
    sft_data_show(out, &d, tok, 5);
    fclose(out);
    text = sft_read_file(path, NULL);
    assert_non_null(strstr(text, "a>⟦bcde⟧\n"));
    assert_non_null(strstr(text, "rows      3 read, 1 dropped: without text\nsamples   2, 1 conversations cut short"));
    free(text), sft_dataset_free(&d), sft_config_free(&c);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(every_format),
                                       cmocka_unit_test(every_shape_of_file),
                                       cmocka_unit_test(masks),
                                       cmocka_unit_test(prompts),
                                       cmocka_unit_test(malformed_rows),
                                       cmocka_unit_test(long_rows),
                                       cmocka_unit_test(files_weights_and_folders),
                                       cmocka_unit_test(packs_of_trl),
                                       cmocka_unit_test(best_fit_is_best_fit),
                                       cmocka_unit_test(batches_never_cross_documents),
                                       cmocka_unit_test(orders_and_splits),
                                       cmocka_unit_test(the_largest_batch_is_the_largest_of_the_run),
                                       cmocka_unit_test(reports)};
    return cmocka_run_group_tests(tests, setup, teardown) != 0;
}
