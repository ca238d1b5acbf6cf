// [11] record: the log, its lines for people, resuming, the bar, a full disk.
#define _GNU_SOURCE // posix_openpt
#include "test.h"
#include <fcntl.h>

static char folder[64];
static SftConfig config;

static int setup(void **state) {
    (void)state;
    strcpy(folder, "/tmp/sft_record_XXXXXX");
    if (!mkdtemp(folder)) return 1;
    config = sft_config(8, (char *[]){"train_gpt2", "--model_name_or_path", "m", "--train_file", "f",
                                      "--output_dir", folder, "--json"});
    return 0;
}

static int teardown(void **state) {
    (void)state;
    char path[4096];
    unlink(sft_path(path, folder, "log.jsonl"));
    unlink(sft_path(path, folder, "screen"));
    rmdir(folder);
    sft_config_free(&config);
    return 0;
}

static json_t *log_line(int number) { // of log.jsonl, from 0; NULL past the end
    char path[4096];
    size_t n;
    char *text = sft_read_file(sft_path(path, folder, "log.jsonl"), &n), *p = text;
    assert_true(n == 0 || text[n - 1] == '\n');
    for (; number && p; number--) p = strchr(p, '\n') ? strchr(p, '\n') + 1 : NULL;
    json_t *line = p && *p ? json_loadb(p, strcspn(p, "\n"), JSON_REJECT_DUPLICATES, NULL) : NULL;
    if (p && *p) assert_non_null(line);
    free(text);
    return line;
}

static double number(json_t *line, const char *key) { return json_number_value(json_object_get(line, key)); }

// What the functions called between these two wrote on standard error (config has --json: lines for people go
// there).
static int kept;
static void screen_begin(void) {
    char path[4096];
    fflush(stderr);
    kept = dup(STDERR_FILENO);
    int file = open(sft_path(path, folder, "screen"), O_RDWR | O_CREAT | O_TRUNC, 0600);
    assert_true(file >= 0);
    dup2(file, STDERR_FILENO);
    close(file);
}
static char *screen_end(void) {
    char path[4096];
    fflush(stderr);
    dup2(kept, STDERR_FILENO);
    close(kept);
    return sft_read_file(sft_path(path, folder, "screen"), NULL);
}

static SftStepLine step_line(int64_t step) {
    return (SftStepLine){.update = {.grad_norm = 1.5, .lr = 2e-5},
                         .step = step,
                         .total = 40,
                         .tokens = 3000,
                         .trained_tokens = 1000,
                         .epoch = 0.1 * (double)step,
                         .loss = 2.25,
                         .seconds = 0.5,
                         .loss_scale = 65536};
}

static void the_log_has_the_names_people_know(void **state) {
    (void)state;
    screen_begin();
    SftRecord *r = sft_record_open(&config, 0);
    SftStepLine line = step_line(1);
    sft_record_step(r, &line);
    line.step = 2, line.update.clipped = true, line.comm_seconds = 0.125;
    sft_record_step(r, &line);
    line.step = 3, line.update = (SftStep){.grad_norm = NAN, .lr = 1e-5, .skipped = true}, line.loss = INFINITY;
    sft_record_step(r, &line);
    sft_record_evaluation(r, 3, 0.5, 77, NAN);
    json_t *prompt = json_string("1 + 1 = ?");
    sft_record_sample(r, 3, prompt, "2");
    json_decref(prompt);
    SftModel model = {0};
    model.mem[0].size = 1000, model.mem[0].peak = 900;
    json_decref(sft_record_summary(r, &model, NAN, 0.5));
    sft_record_close(r);
    char *screen = screen_end();
    assert_non_null(strstr(screen, "step  1/40  epoch 0.10  loss 2.2500  lr 2.00e-05  norm 1.5  6.0k tok/s"));
    assert_non_null(strstr(screen, "norm 1.5 clipped"));
    assert_non_null(strstr(screen, "SKIPPED"));
    assert_non_null(strstr(screen, "skipped 1"));
    assert_null(strstr(screen, "scale ")); // only with fp16
    assert_non_null(strstr(screen, "validation loss 0.5000  perplexity 1.649"));
    free(screen);

    json_t *l = log_line(0);
    assert_string_equal(json_string_value(json_object_get(l, "event")), "config");
    assert_int_equal(number(l, "seed"), 42);
    assert_non_null(json_object_get(l, "template"));
    json_decref(l);
    l = log_line(1);
    static const char *const names[] = {"step",          "epoch",  "loss",           "grad_norm",
                                        "learning_rate", "tokens", "trained_tokens", "tokens_per_second",
                                        "step_seconds"};
    assert_int_equal(json_object_size(l), SFT_COUNT(names));
    for (int i = 0; i < SFT_COUNT(names); i++) assert_true(json_is_number(json_object_get(l, names[i])));
    assert_true(number(l, "loss") == 2.25 && number(l, "tokens_per_second") == 6000 &&
                number(l, "learning_rate") == 2e-5);
    json_decref(l);
    l = log_line(2);
    assert_int_equal(json_object_size(l), SFT_COUNT(names) + 2);
    assert_true(json_is_true(json_object_get(l, "clipped")) && number(l, "comm_seconds") == 0.125);
    json_decref(l);
    l = log_line(3);
    assert_true(json_is_true(json_object_get(l, "skipped")) && json_is_null(json_object_get(l, "loss")) &&
                json_is_null(json_object_get(l, "grad_norm")));
    json_decref(l);
    l = log_line(4);
    assert_true(json_object_size(l) == 3 && number(l, "eval_loss") == 0.5 && number(l, "eval_tokens") == 77);
    json_decref(l);
    l = log_line(5);
    assert_string_equal(json_string_value(json_object_get(l, "prompt")), "1 + 1 = ?");
    assert_string_equal(json_string_value(json_object_get(l, "answer")), "2");
    json_decref(l);
    l = log_line(6);
    assert_string_equal(json_string_value(json_object_get(l, "event")), "summary");
    assert_true(number(l, "plan_bytes") == 1000 && number(l, "peak_bytes") == 900 &&
                number(l, "peak_rss_bytes") > 1e6);
    assert_true(number(l, "steps") == 3 && number(l, "skipped") == 1 && number(l, "clipped") == 1 &&
                number(l, "tokens") == 9000);
    json_decref(l);
    assert_null(log_line(7));
}

static void lines_are_means_over_logging_steps(void **state) {
    (void)state;
    config.logging_steps = 2;
    screen_begin();
    SftRecord *r = sft_record_open(&config, 0);
    SftStepLine line = step_line(1);
    line.loss = 3, line.trained_tokens = 1000;
    sft_record_step(r, &line);
    line.step = 2, line.loss = 1, line.trained_tokens = 3000; // (3 * 1000 + 1 * 3000) / 4000
    sft_record_step(r, &line);
    sft_record_close(r);
    char *screen = screen_end();
    config.logging_steps = 1;
    assert_null(strstr(screen, "step  1/40"));
    assert_non_null(strstr(screen, "step  2/40  epoch 0.10  loss 1.5000"));
    free(screen);
    json_t *l = log_line(2); // the log has every step, each with its own loss
    assert_true(number(l, "loss") == 1);
    json_decref(l);
}

static void a_resumed_log_is_cut_back(void **state) {
    (void)state;
    char path[4096];
    static const char old[] =
        "{\"event\":\"config\",\"seed\":1}\n{\"step\":1,\"loss\":9}\n{\"step\":2,\"loss\":8}\n{\"step\":2,"
        "\"eval_loss\":7}\n"
        "{\"step\":3,\"loss\":6}\n{\"event\":\"summary\",\"steps\":3}\n{\"step\":2,\"lo";
    sft_write_file(sft_path(path, folder, "log.jsonl"), old, sizeof old - 1);
    screen_begin();
    SftRecord *r = sft_record_open(&config, 2);
    SftStepLine line = step_line(3);
    sft_record_step(r, &line);
    sft_record_close(r);
    free(screen_end());
    const double losses[] = {0, 9, 8, 0, 2.25};
    for (int i = 0; i < 5; i++) {
        json_t *l = log_line(i);
        assert_true(number(l, "loss") == losses[i]);
        json_decref(l);
    }
    assert_null(log_line(5));
    r = sft_record_open(&config, 0); // a fresh run begins a fresh log
    sft_record_close(r);
    assert_null(log_line(1));
    unlink(path);
    r = sft_record_open(&config, 7); // nothing to go on with: begins with the configuration all the same
    sft_record_close(r);
    json_t *l = log_line(0);
    assert_string_equal(json_string_value(json_object_get(l, "event")), "config");
    json_decref(l);
}

static void a_full_disk_ends_the_run(void **state) {
    (void)state;
    char path[4096];
    if (access("/dev/full", W_OK)) skip();
    assert_int_equal(symlink("/dev/full", sft_path(path, folder, "log.jsonl")), 0);
    EXPECT_ERROR(sft_record_open(&config, 0), "No space left");
    assert_int_equal(test__status, SFT_BROKEN);
    unlink(path);
}

// On a pseudo-terminal the bar is drawn, at most ten times a second, and removed at the end; elsewhere
// nothing is.
static void the_bar_shows_on_a_terminal_only(void **state) {
    (void)state;
    screen_begin();
    for (int i = 0; i <= 100; i++) sft_progress("pipe", i, 100);
    char *screen = screen_end(), drawn[8192] = "";
    assert_string_equal(screen, "");
    free(screen);
    int terminal = posix_openpt(O_RDWR | O_NOCTTY);
    if (terminal < 0 || grantpt(terminal) || unlockpt(terminal)) skip();
    int side = open(ptsname(terminal), O_RDWR | O_NOCTTY), old = dup(STDERR_FILENO);
    if (side < 0) skip();
    dup2(side, STDERR_FILENO);
    double begin = sft_now();
    for (int i = 0; i < 1000 || sft_now() - begin < 0.35; i++) sft_progress("reading", SFT_MIN(i, 999), 1000);
    double seconds = sft_now() - begin;
    sft_progress("reading", 1000, 1000);
    sft_progress("other", 1, 3);
    sft_progress("", 1, 1); // takes any bar away
    fflush(stderr);
    dup2(old, STDERR_FILENO);
    close(side), close(old);
    fcntl(terminal, F_SETFL, O_NONBLOCK);
    ssize_t n = 0; // the kernel hands the bytes over in its own time
    for (double until = sft_now() + 5;
         sft_now() < until && (n < 4 || strcmp(drawn + n - 4, "\r\033[K") || !strstr(drawn, "other"));) {
        ssize_t more = read(terminal, drawn + n, sizeof drawn - 1 - (size_t)n);
        n += more > 0 ? more : 0;
    }
    close(terminal);
    assert_true(n > 0);
    int pictures = 0;
    for (char *p = drawn; (p = strstr(p, "reading")); p++) pictures++;
    assert_in_range(pictures, 2, (int)(seconds * 10) + 1);
    assert_non_null(strstr(drawn, "["));
    assert_non_null(strstr(drawn, "eta 0:0"));
    assert_string_equal(drawn + n - 4, "\r\033[K");
}

static void numbers_are_short(void **state) {
    (void)state;
    SftShort s;
    assert_string_equal(sft__short(s, 0), "0");
    assert_string_equal(sft__short(s, 999), "999");
    assert_string_equal(sft__short(s, 6140), "6.1k");
    assert_string_equal(sft__short(s, 999600), "1.0M");
    assert_string_equal(sft__short(s, 123456789), "123M");
    assert_string_equal(sft__clock(s, 7.4), "0:07");
    assert_string_equal(sft__clock(s, 754), "12:34");
    assert_string_equal(sft__clock(s, 3723), "1:02:03");
    json_t *nothing = sft_json_real(NAN);
    assert_true(json_is_null(nothing));
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
SFT_TEST_MAIN(TEST(the_log_has_the_names_people_know), TEST(lines_are_means_over_logging_steps),
              TEST(a_resumed_log_is_cut_back), TEST(a_full_disk_ends_the_run),
              TEST(the_bar_shows_on_a_terminal_only), cmocka_unit_test(numbers_are_short))
