// data/: the sets are what the generator writes, every answer is right by a rule written here anew, and
// nothing that is held out is trained.
#include "test.h"
#include <ctype.h>
#define main generate__main
#define state generate__state
#include "../data/generate.c"
#undef state
#undef main

typedef struct { const char *instruction, *input, *output; json_t *json; } Row;
typedef struct { Row *row; int n; } Rows;

static Rows rows_of(const char *path) {
    size_t bytes;
    char *text = sft_read_file(path, &bytes);
    Rows r = {SFT_NEW(Row, 10000), 0};
    for (char *line = text, *end; *line; line = end + 1) {
        assert_non_null(end = strchr(line, '\n'));
        json_t *json = json_loadb(line, (size_t)(end - line), JSON_REJECT_DUPLICATES, NULL);
        assert_int_equal(json_object_size(json), 3);
        r.row[r.n++] = (Row){json_string_value(json_object_get(json, "instruction")),
                             json_string_value(json_object_get(json, "input")),
                             json_string_value(json_object_get(json, "output")), json};
    }
    free(text);
    return r;
}

static void rows_free(Rows r) {
    for (int i = 0; i < r.n; i++) json_decref(r.row[i].json);
    free(r.row);
}

static void the_files_are_what_the_generator_writes(void **state) {
    (void)state;
    char folder[] = "/tmp/sft_default_XXXXXX", path[4096];
    assert_non_null(mkdtemp(folder));
    char *arguments[] = {"generate", folder, "200", NULL};
    assert_int_equal(generate__main(3, arguments), 0);
    const char *const kept[][2] = {{"instructions.jsonl", "data/instructions.jsonl"},
                                   {"heldout.jsonl", "data/heldout.jsonl"}};
    for (int i = 0; i < 2; i++) {
        size_t n, m;
        char *fresh = sft_read_file(sft_path(path, folder, kept[i][0]), &n),
             *old = sft_read_file(kept[i][1], &m);
        assert_int_equal(n, m);
        assert_memory_equal(fresh, old, n);
        free(fresh), free(old), unlink(path);
    }
    size_t n, m;
    char *once = sft_read_file(sft_path(path, folder, "corpus.txt"), &n);
    assert_int_equal(generate__main(3, arguments), 0);
    char *again = sft_read_file(path, &m);
    assert_int_equal(n, m);
    assert_memory_equal(once, again, n);
    free(once), free(again), unlink(path);
    unlink(sft_path(path, folder, kept[0][0])), unlink(sft_path(path, folder, kept[1][0])), rmdir(folder);
}

/* ---- The rules, written without the generator's: they read the question as it stands there ---- */
static int split(char word[8][64], const char *list) { // at spaces
    int n = 0;
    for (const char *p = list; *p && n < 8; p += *p == ' ') {
        size_t length = strcspn(p, " ");
        snprintf(word[n++], 64, "%.*s", (int)length, p), p += length;
    }
    return n;
}

static const Thing *named(const char *name, bool zh) { // with or without its article
    const char *bare = !strncmp(name, "a ", 2) ? name + 2 : !strncmp(name, "an ", 3) ? name + 3 : name;
    for (int i = 0; i < THINGS; i++)
        if (!strcmp(zh ? things[i].zh : things[i].en, zh ? name : bare)) return &things[i];
    return NULL;
}

static bool right_list(const Kind *k, const char *list, const char *answer) {
    char word[8][64], got[8][64];
    int n = split(word, list), m = split(got, answer);
    if (k->make == count) return atoi(answer) == n && m == 1;
    if (k->make == first_word) return m == 1 && !strcmp(got[0], word[0]);
    if (k->make == last_word) return m == 1 && !strcmp(got[0], word[n - 1]);
    if (n != m) return false;
    if (k->make == reverse) {
        for (int i = 0; i < n; i++)
            if (strcmp(word[i], got[n - 1 - i])) return false;
        return true;
    }
    int sum = 0; // sort: rising, and the same digits
    for (int i = 0; i < n; i++)
        sum += (1 << atoi(word[i])) - (1 << atoi(got[i])),
            assert_true(i == 0 || atoi(got[i]) > atoi(got[i - 1]));
    return sum == 0;
}

static bool right_lookup(const Kind *k, const char *a, const char *answer) {
    const Thing *t = named(a, k->zh);
    for (int i = 0; i < OPPOSITES; i++)
        for (int side = 0; side < 2; side++) {
            const char *en = opposites[i][side], *zh = opposites[i][2 + side];
            if (strcmp(a, k->zh ? zh : en)) continue;
            if (k->make == opposite) return !strcmp(answer, opposites[i][2 * k->zh + !side]);
            return k->make == translate && !strcmp(answer, k->zh ? en : zh);
        }
    if (!t || k->make == opposite) return false;
    if (k->make == translate) return !strcmp(answer, k->zh ? t->en : t->zh);
    if (k->make == colour)
        return t->colour && !strcmp(answer, k->zh ? colour_zh[t->colour] : colour_en[t->colour]);
    if (k->make == category)
        return t->kind != OTHER && !strcmp(answer, k->zh ? kind_zh[t->kind] : kind_en[t->kind]);
    if (k->make == classifier) return !strcmp(answer, t->classifier);
    static const char *const special[][2] = {{"mouse", "mice"},
                                             {"tooth", "teeth"},
                                             {"sheep", "sheep"},
                                             {"fish", "fish"},
                                             {"knife", "knives"},
                                             {"wolf", "wolves"},
                                             {"leaf", "leaves"},
                                             {"tomato", "tomatoes"},
                                             {"potato", "potatoes"},
                                             {"mango", "mangoes"},
                                             {"fox", "foxes"},
                                             {"box", "boxes"},
                                             {"bus", "buses"},
                                             {"brush", "brushes"},
                                             {"peach", "peaches"},
                                             {"church", "churches"},
                                             {"dress", "dresses"},
                                             {"cherry", "cherries"},
                                             {"strawberry", "strawberries"},
                                             {"lily", "lilies"},
                                             {"factory", "factories"}};
    for (int i = 0; i < SFT_COUNT(special); i++)
        if (!strcmp(a, special[i][0])) return !strcmp(answer, special[i][1]);
    return strlen(answer) == strlen(a) + 1 && !strncmp(a, answer, strlen(a)) && answer[strlen(a)] == 's';
}

static bool right(const Kind *k, const char *a, const char *c, const char *answer) {
    if (k->make == plus) return atoi(answer) == atoi(a) + atoi(c);
    if (k->make == repeat) {
        char word[8][64];
        int n = split(word, answer);
        for (int i = 0; i < n; i++)
            if (strcmp(word[i], a)) return false;
        return n == atoi(c);
    }
    if (k->make == who || k->make == what) { // the very sentence stands in the story
        const Thing *t = named(k->make == who ? c : answer, k->zh);
        const char *person = k->make == who ? answer : c;
        char sentence[256];
        for (int i = 0; i < THINGS; i++) { // the Chinese answer is 一, a classifier and a thing
            snprintf(sentence, sizeof sentence, "一%s%s", things[i].classifier, things[i].zh);
            if (k->make == what && k->zh && !strcmp(sentence, answer)) t = &things[i];
        }
        if (!t) return false;
        if (k->zh) snprintf(sentence, sizeof sentence, "%s有一%s%s。", person, t->classifier, t->zh);
        else
            snprintf(sentence, sizeof sentence, "%s has %s %s.", person,
                     strchr("aeiou", t->en[0]) ? "an" : "a", t->en);
        return strstr(a, sentence) != NULL;
    }
    if (k->make == first_word || k->make == last_word || k->make == reverse || k->make == count ||
        k->make == sort)
        return right_list(k, a, answer);
    return right_lookup(k, a, answer);
}

// Does `text` read as `pattern` so that the answer is right? Every way of taking {a} and {c} out of it is
// tried.
static bool reads(const Kind *k, const char *pattern, const char *text, char a[256], char c[256],
                  const char *answer) {
    if (!*pattern) return !*text && right(k, a, c, answer);
    char *field = !strncmp(pattern, "{a}", 3) ? a : !strncmp(pattern, "{c}", 3) ? c : NULL;
    if (!field) return *pattern == *text && reads(k, pattern + 1, text + 1, a, c, answer);
    for (size_t n = 1; n <= strlen(text) && n < 256; n++) {
        snprintf(field, 256, "%.*s", (int)n, text);
        if (reads(k, pattern + 3, text + n, a, c, answer)) return true;
    }
    return false;
}

static int kind_of(const Row *r, char a[256], char c[256]) { // -1: there is no kind for which the answer is right
    char text[1024];
    *a = *c = 0;
    snprintf(text, sizeof text, "%s%s%s", r->instruction, *r->input ? "|" : "", r->input);
    for (int k = 0; k < KINDS; k++)
        for (int i = 0; i < 3; i++)
            if (reads(&kinds[k], kinds[k].ask[i], text, a, c, r->output)) return k;
    return -1;
}

static void every_answer_is_right(void **state) {
    (void)state;
    const char *const path[] = {"data/instructions.jsonl", "data/heldout.jsonl"};
    char a[256], c[256];
    for (int f = 0; f < 2; f++) {
        Rows r = rows_of(path[f]);
        int rows_of_kind[KINDS] = {0};
        for (int i = 0; i < r.n; i++) {
            int k = kind_of(&r.row[i], a, c);
            if (k < 0)
                fail_msg("%s, line %d: \"%s\" is a wrong answer to \"%s %s\"", path[f], i + 1,
                         r.row[i].output, r.row[i].instruction, r.row[i].input);
            rows_of_kind[k]++;
        }
        for (int k = 0; k < KINDS; k++)
            assert_in_range(rows_of_kind[k], f ? HELDOUT : 60, f ? HELDOUT : ROWS);
        Row wrong = r.row[0]; // the check can fail
        wrong.output = "wrong";
        assert_int_equal(kind_of(&wrong, a, c), -1);
        rows_free(r);
    }
}

/* What a row is about, in numbers that are the same in both languages: a skill (all of lists count as one, and so do
   stories) and the words, digits or things of the question, sorted. Read from the row alone. */
typedef struct { int skill, n, about[8]; } Content;
static int ascending(const void *x, const void *y) { return *(const int *)x - *(const int *)y; }

static int number_of(const char *word, bool zh) { // of a word, whichever language names it
    const Thing *t = named(word, zh);
    for (int w = THINGS; !t && w < THINGS + 2 * OPPOSITES; w++)
        if (!strcmp(word, opposites[(w - THINGS) / 2][2 * zh + (w - THINGS) % 2])) return w;
    assert_non_null(t);
    return (int)(t - things);
}

static Content content_of(const Row *r) {
    char a[256], c[256], word[8][64], sentence[600];
    const Kind *k = &kinds[kind_of(r, a, c)];
    Content it = {0};
    while (kinds[it.skill].make != k->make) it.skill++;
    if (k->make == first_word || k->make == last_word || k->make == reverse || k->make == count) it.skill = -1;
    if (k->make == who || k->make == what) {
        it.skill = -2;
        for (int i = 0; i < THINGS; i++) {
            const char *en = things[i].en;
            if (k->zh) snprintf(sentence, sizeof sentence, "有一%s%s。", things[i].classifier, things[i].zh);
            else snprintf(sentence, sizeof sentence, "has %s %s.", strchr("aeiou", *en) ? "an" : "a", en);
            if (strstr(a, sentence)) it.about[it.n++] = i;
        }
    } else if (k->make == sort || k->make == plus) {
        snprintf(sentence, sizeof sentence, "%s %s", a, c);
        for (int i = 0; sentence[i]; i++)
            if (isdigit((unsigned char)sentence[i])) it.about[it.n++] = sentence[i];
    } else if (it.skill == -1) {
        it.n = split(word, a);
        for (int i = 0; i < it.n; i++) it.about[i] = number_of(word[i], k->zh);
    } else {
        it.about[it.n++] = number_of(a, k->zh);
        if (k->make == opposite) it.about[0] = (it.about[0] - THINGS) / 2;
    }
    qsort(it.about, (size_t)it.n, sizeof *it.about, ascending);
    return it;
}

static void nothing_held_out_is_trained(void **state) {
    (void)state;
    Rows train = rows_of("data/instructions.jsonl"), test = rows_of("data/heldout.jsonl");
    assert_in_range(test.n, 200, 340);
    Content *trained = SFT_NEW(Content, train.n);
    bool seen[THINGS + 2 * OPPOSITES] = {0};
    for (int j = 0; j < train.n; j++) {
        trained[j] = content_of(&train.row[j]);
        for (int i = 0; trained[j].skill == -1 && i < trained[j].n; i++) seen[trained[j].about[i]] = true;
    }
    for (int w = 0; w < SFT_COUNT(seen); w++) assert_true(seen[w]); // but every word is
    for (int i = 0; i < test.n; i++) {
        Content it = content_of(&test.row[i]);
        for (int j = 0; j < train.n; j++)
            if (!memcmp(&it, &trained[j], sizeof it))
                fail_msg("held out and trained: %s %s", test.row[i].instruction, test.row[i].input);
    }
    free(trained), rows_free(train), rows_free(test);
}

static void the_tokenizer_keeps_words_whole(void **state) {
    (void)state;
    SftTokenizer *t = sft_tokenizer_load("data/tiny");
    SftIds ids = {0};
    for (int i = 0; i < THINGS + 2 * OPPOSITES;
         i++) { // an English word is one token, whatever stands before it
        const char *word = i < THINGS ? things[i].en : opposites[(i - THINGS) / 2][(i - THINGS) % 2];
        char text[64];
        snprintf(text, sizeof text, "%s %s", word, word);
        ids.n = 0, sft_encode(t, &ids, text, strlen(text), false);
        assert_int_equal(ids.n, 3);
        assert_int_equal(ids.ids[0], ids.ids[2]);
    }
    for (int i = 0; i < THINGS; i++) { // a Chinese character is one token
        ids.n = 0, sft_encode(t, &ids, things[i].zh, strlen(things[i].zh), false);
        assert_int_equal(ids.n, strlen(things[i].zh) / 3);
    }
    Rows r = rows_of("data/heldout.jsonl");
    for (int i = 0; i < r.n; i++) {
        size_t bytes;
        ids.n = 0, sft_encode(t, &ids, r.row[i].instruction, strlen(r.row[i].instruction), false);
        char *back = sft_decode(t, ids.ids, ids.n, false, &bytes);
        assert_string_equal(back, r.row[i].instruction);
        free(back);
    }
    rows_free(r), free(ids.ids), sft_tokenizer_free(t);
}

// The run files are read without a complaint, and every sample file as the format that its name says.
static void run_files_and_samples_are_read(void **state) {
    (void)state;
    SftTokenizer *t = sft_tokenizer_load("data/tiny");
    SftTemplate *tpl = sft_template(t, NULL, NULL);
    assert_string_equal(sft_template_name(tpl), "chatml");
    SftConfig run = sft_config(3, (char *[]){"train_gpt2", "train", "data/quickstart.json"});
    SftDataset d = sft_dataset(&run, t, tpl, run.validation_file);
    assert_int_equal(d.samples, d.report.rows);
    assert_int_equal(d.report.truncated, 0);
    sft_dataset_free(&d);
    const struct { const char *file; int rows; } sample[] = {
        {"alpaca.json", 4},   {"alpaca_history.json", 3},     {"messages.jsonl", 4}, {"conversation.json", 3},
        {"sharegpt.json", 3}, {"prompt_completion.jsonl", 3}, {"text.jsonl", 3},     {"text.txt", 4},
        {"columns.jsonl", 3}};
    run.max_length = 1024;
    for (int i = 0; i < SFT_COUNT(sample); i++) {
        char path[4096];
        json_t *files = json_string(sft_path(path, "data/samples", sample[i].file));
        if (!strcmp(sample[i].file, "columns.jsonl")) {
            EXPECT_ERROR(sft_dataset(&run, t, tpl, files), "columns.jsonl");
            run.columns = json_pack("{s:s, s:s}", "query", "user", "response", "assistant");
        }
        d = sft_dataset(&run, t, tpl, files);
        assert_int_equal(d.samples, sample[i].rows);
        assert_int_equal(d.report.bad, 0);
        sft_dataset_free(&d), json_decref(files);
    }
    sft_config_free(&run), sft_template_free(tpl), sft_tokenizer_free(t);
    run = sft_config(3, (char *[]){"train_gpt2", "train", "data/pretrain.json"});
    assert_string_equal(run.init, "scratch");
    sft_config_free(&run);
}

SFT_TEST_MAIN(cmocka_unit_test(run_files_and_samples_are_read),
              cmocka_unit_test(the_tokenizer_keeps_words_whole),
              cmocka_unit_test(the_files_are_what_the_generator_writes),
              cmocka_unit_test(every_answer_is_right), cmocka_unit_test(nothing_held_out_is_trained))
