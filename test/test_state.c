// [9] state: a resumed run has the same bits; whatever kills, cuts or fills, what was saved is there or the error
// says so.
#include "test.h"
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>

static const char *const llama =
    "{\"model_type\": \"llama\", \"vocab_size\": 19, \"hidden_size\": 16, \"intermediate_size\": 20,"
    " \"num_hidden_layers\": 2, \"num_attention_heads\": 4, \"num_key_value_heads\": 2, \"head_dim\": 4,"
    " \"max_position_embeddings\": 32, \"rms_norm_eps\": 1e-6, \"rope_theta\": 10000.0, \"attention_bias\": true,"
    " \"tie_word_embeddings\": false, \"eos_token_id\": 2, \"torch_dtype\": \"bfloat16\"}";
static const char *const gpt2 =
    "{\"model_type\": \"gpt2\", \"vocab_size\": 19, \"n_embd\": 12, \"n_layer\": 2, \"n_head\": 3, \"n_positions\": 8, "
    "\"n_ctx\": 8,"
    " \"activation_function\": \"gelu_new\", \"layer_norm_epsilon\": 1e-5, \"eos_token_id\": 18}";

// A run in a folder of its own: DIR/model (config.json, a tokenizer file), DIR/out (output_dir).
typedef struct {
    char dir[64], model[80], out[80];
    SftConfig config;
    SftModel m;
    SftTrainer t;
    SftArena work;
    SftCtx c;
} Run;

static void put(const char *folder, const char *name, const char *text) {
    char path[4096];
    sft_make_folder(folder);
    sft_write_file(sft_path(path, folder, name), text, strlen(text));
}

// Lays out a model of the folder's config.json with random weights, and a trainer at step 0.
static void run_fresh(Run *r) {
    r->m = (SftModel){.arch = sft_arch(r->model), .ops = &sft_cpu, .type = r->config.type, .trains = true};
    for (int pass = 0; pass < 2; pass++) { // count, then take
        for (int i = 0; pass && i < SFT_MEMS; i++) sft_arena_open(&r->m.mem[i], "memory", r->m.mem[i].peak);
        if (pass) sft_units_close(&r->m);
        sft_units_open(&r->m);
    }
    r->m.sums = SFT_NEW(double, 2 * (r->m.units + 1));
    sft_init_weights(&r->m, 42);
    r->t = sft_trainer(&r->config, 12);
    r->c = (SftCtx){.ops = &sft_cpu, .work = &r->work};
}
static void run_close(Run *r) {
    sft_units_close(&r->m);
    free(r->m.sums);
    for (int i = 0; i < SFT_MEMS; i++) sft_arena_close(&r->m.mem[i]);
    sft_arch_free(&r->m.arch);
}
static void run_open(Run *r, const char *config_json, SftType type, const char *dir) {
    *r = (Run){.config = {.type = type,
                          .learning_rate = 1e-2,
                          .lr_scheduler_type = "cosine",
                          .adam_beta1 = 0.9,
                          .adam_beta2 = 0.99,
                          .adam_epsilon = 1e-8,
                          .weight_decay = 0.1,
                          .max_grad_norm = 1,
                          .max_nonfinite_steps = 3,
                          .export_dtype = "auto",
                          .max_shard_size = 5e9,
                          .seed = 42}};
    // in memory where that is possible: the same calls, but an fsync costs nothing
    const char *ours = access("/dev/shm", W_OK) ? "/tmp/sft_state_XXXXXX" : "/dev/shm/sft_state_XXXXXX";
    snprintf(r->dir, sizeof r->dir, "%s", dir ? dir : ours);
    if (!dir) assert_non_null(mkdtemp(r->dir));
    snprintf(r->model, sizeof r->model, "%s/model", r->dir);
    snprintf(r->out, sizeof r->out, "%s/out", r->dir);
    if (!dir)
        put(r->model, "config.json", config_json), put(r->model, "tokenizer_config.json", "{\"a\": 1}"),
            put(r->model, "notes.txt", "mine");
    r->config.model_name_or_path = r->model, r->config.output_dir = r->out;
    if (type == SFT_F16)
        r->config.fp16 =
            json_pack("{s:i, s:i, s:i}", "loss_scale_window", 2, "initial_scale_power", 4, "hysteresis", 1);
    sft_arena_open(&r->work, "workspace", 1 << 20);
    run_fresh(r);
}
static void run_end(Run *r) {
    char command[128];
    run_close(r);
    sft_arena_close(&r->work);
    json_decref(r->config.fp16);
    snprintf(command, sizeof command, "rm -rf %s", r->dir);
    assert_int_equal(system(command), 0);
}
static void run_steps(Run *r, int n) { // gradients from the step number, as data and dropout would be
    for (int k = 0; k < n; k++) {
        double scale = r->t.scaler.scale;
        sft_zero_grad(&r->c, &r->m);
        for (int64_t u = 0; u < r->m.units; u++)
            for (int64_t i = 0; i < r->m.unit[u].count; i++)
                r->m.unit[u].grad[i] =
                    (float)(scale * (sft_uniform(sft_random(7, (uint64_t)r->t.step, (uint64_t)u, (uint64_t)i)) - 0.5));
        if (r->m.type == SFT_F16 && r->t.step == 3) r->m.unit[1].grad[5] = INFINITY; // a skipped step, a halved scale
        sft_update(&r->c, &r->m, &r->t, &r->config, scale);
    }
}
static void assert_equal_runs(const Run *a, const Run *b) {
    for (int64_t u = 0; u < a->m.units; u++) {
        const SftUnit *x = &a->m.unit[u], *y = &b->m.unit[u];
        assert_memory_equal(x->master, y->master, (size_t)x->count * 4);
        assert_memory_equal(x->m, y->m, (size_t)x->count * 4);
        assert_memory_equal(x->v, y->v, (size_t)x->count * 4);
        assert_memory_equal(x->weights, y->weights, (size_t)x->count * sft_type_size(a->m.type));
    }
    assert_memory_equal(&a->t.scaler.scale, &b->t.scaler.scale, sizeof(double));
    assert_true(a->t.step == b->t.step && a->t.updates == b->t.updates && a->t.total == b->t.total &&
                a->t.bad_in_a_row == b->t.bad_in_a_row);
    assert_true(a->t.scaler.iter == b->t.scaler.iter && a->t.scaler.last_overflow == b->t.scaler.last_overflow &&
                a->t.scaler.left == b->t.scaler.left);
}

static void a_resumed_run_has_the_same_bits(void **state) {
    (void)state;
    for (int i = 0; i < 6; i++) {
        Run a, b;
        run_open(&a, i % 2 ? gpt2 : llama, (SftType)(i / 2), NULL);
        run_open(&b, i % 2 ? gpt2 : llama, (SftType)(i / 2), NULL);
        run_steps(&a, 8);
        run_steps(&b, 5); // the f16 run has skipped one
        sft_checkpoint_save(&b.m, &b.t, &b.config);
        run_close(&b);
        run_fresh(&b);
        b.config.resume_from_checkpoint = json_true();
        char *folder = sft_checkpoint_find(&b.config);
        assert_true(strstr(folder, "/out/checkpoint-5") != NULL);
        sft_checkpoint_load(&b.m, &b.t, &b.config, folder);
        assert_int_equal(b.t.step, 5);
        run_steps(&b, 3);
        assert_equal_runs(&a, &b);
        free(folder);
        run_end(&a), run_end(&b);
    }
}

static void a_checkpoint_holds_what_it_says(void **state) {
    (void)state;
    Run r;
    char path[4096], folder[4096];
    run_open(&r, llama, SFT_BF16, NULL);
    r.config.save_total_limit = 2;
    for (int i = 1; i <= 4; i++) {
        run_steps(&r, 1);
        sft_checkpoint_save(&r.m, &r.t, &r.config);
        sft_checkpoint_save(&r.m, &r.t, &r.config); // the same step again: replaced, and counted once
    }
    int n;
    SftSaved *list = sft__checkpoints(r.out, &n);
    assert_int_equal(n, 2);
    assert_string_equal(list[0].name, "checkpoint-3");
    assert_string_equal(list[1].name, "checkpoint-4");
    free(list);
    char **names = sft__list(r.out, &n);
    assert_int_equal(n, 3); // and latest
    sft__list_free(names, n);
    char *latest = sft_read_file(sft_path(path, r.out, "latest"), NULL);
    assert_string_equal(latest, "checkpoint-4\n");
    free(latest);
    sft_path(folder, r.out, "checkpoint-4");
    assert_true(sft_exists(sft_path(path, folder, "tokenizer_config.json")));
    assert_true(sft_exists(sft_path(path, folder, "config.json")));
    assert_false(sft_exists(sft_path(path, folder, "notes.txt")));
    json_t *json = sft_json_file(sft_path(path, folder, "state.json"));
    assert_int_equal(json_integer_value(json_object_get(json, "step")), 4);
    assert_int_equal(json_integer_value(json_object_get(json_object_get(json, "config"), "seed")), 42);
    json_decref(json);
    // weights alone, into a run at step 0: masters as saved, the rest untouched; its own step and moments stay
    float *was = SFT_NEW(float, r.m.unit[1].count);
    memcpy(was, r.m.unit[1].master, (size_t)r.m.unit[1].count * 4);
    run_close(&r);
    run_fresh(&r);
    sft_checkpoint_load(&r.m, NULL, &r.config, folder);
    assert_memory_equal(was, r.m.unit[1].master, (size_t)r.m.unit[1].count * 4);
    assert_true(r.t.step == 0 && r.m.unit[1].m[0] == 0);
    assert_int_equal(r.m.arch.source_type, SFT_BF16); // config.json's, though the checkpoint is in fp32
    free(was);
    run_end(&r);
}

static void finding_says_what_is_there(void **state) {
    (void)state;
    Run r;
    char path[4096];
    run_open(&r, llama, SFT_F32, NULL);
    assert_null(sft_checkpoint_find(&r.config)); // no folder yet
    r.config.resume_from_checkpoint = json_true();
    EXPECT_ERROR(sft_checkpoint_find(&r.config), "there is no checkpoint in output_dir");
    for (int i = 0; i < 3; i++) run_steps(&r, 1), sft_checkpoint_save(&r.m, &r.t, &r.config);
    char *found = sft_checkpoint_find(&r.config);
    assert_true(strstr(found, "checkpoint-3") != NULL);
    free(found);
    r.config.resume_from_checkpoint = json_string("latest");
    free(sft_checkpoint_find(&r.config));
    json_decref(r.config.resume_from_checkpoint);
    snprintf(path, sizeof path, "%s/checkpoint-2", r.out);
    r.config.resume_from_checkpoint = json_string(path);
    found = sft_checkpoint_find(&r.config);
    assert_string_equal(found, path);
    free(found);
    json_decref(r.config.resume_from_checkpoint);
    r.config.resume_from_checkpoint = json_string(r.out);
    EXPECT_ERROR(sft_checkpoint_find(&r.config), "checkpoints in it: checkpoint-1, checkpoint-2, checkpoint-3");
    json_decref(r.config.resume_from_checkpoint);
    r.config.resume_from_checkpoint = NULL;
    EXPECT_ERROR(sft_checkpoint_find(&r.config), "\"resume_from_checkpoint\": true");
    EXPECT_ERROR(sft_checkpoint_find(&r.config), "\"overwrite_output_dir\": true");
    r.config.resume_from_checkpoint = json_true();
    const char *const wrong[] = {"checkpoint-9\n", "checkpoint\n", "", "../out/checkpoint-1", "checkpoint-1.tmp"};
    for (int i = 0; i < SFT_COUNT(wrong); i++) {
        put(r.out, "latest", wrong[i]);
        EXPECT_ERROR(sft_checkpoint_find(&r.config),
                     "name another in resume_from_checkpoint: checkpoint-1, checkpoint-2, checkpoint-3");
        assert_int_equal(test__status, SFT_BAD_INPUT);
    }
    // afresh: the old run can no longer be taken for the new one, and its checkpoints go by age
    r.config.resume_from_checkpoint = NULL, r.config.overwrite_output_dir = true, r.config.save_total_limit = 2;
    assert_null(sft_checkpoint_find(&r.config));
    assert_false(sft_exists(sft_path(path, r.out, "latest")));
    r.t = sft_trainer(&r.config, 12);
    run_steps(&r, 1), sft_checkpoint_save(&r.m, &r.t, &r.config);
    int n;
    SftSaved *list = sft__checkpoints(r.out, &n);
    assert_int_equal(n, 2);
    assert_string_equal(list[1].name, "checkpoint-1");
    free(list);
    run_end(&r);
}

static void damage_is_found(void **state) {
    (void)state;
    Run r;
    char path[4096], folder[4096];
    run_open(&r, gpt2, SFT_F32, NULL);
    run_steps(&r, 1), sft_checkpoint_save(&r.m, &r.t, &r.config);
    run_steps(&r, 1), sft_checkpoint_save(&r.m, &r.t, &r.config);
    sft_path(folder, r.out, "checkpoint-2");
    int n;
    char **names = sft__list(folder, &n);
    for (int i = 0; i < n; i++) {
        size_t bytes;
        char *good = sft_read_file(sft_path(path, folder, names[i]), &bytes);
        unlink(path);
        EXPECT_ERROR(sft_checkpoint_load(&r.m, &r.t, &r.config, folder), names[i]);
        sft_write_file(path, good, bytes - 1);
        if (strcmp(names[i], "state.json")) { // which ends in a newline that it can do without
            EXPECT_ERROR(sft_checkpoint_load(&r.m, &r.t, &r.config, folder), names[i]);
            EXPECT_ERROR(sft_checkpoint_load(&r.m, &r.t, &r.config, folder), "others beside it: checkpoint-1");
        }
        for (int k = 0; k < 40; k++) { // flipped bits and cuts; what does not change the text's meaning may load
            size_t at = (size_t)(sft_random(1, (uint64_t)i, 2, (uint64_t)k) % bytes);
            char old = good[at];
            good[at] ^= (char)(1 << (k % 8));
            sft_write_file(path, good, k % 5 ? bytes : at);
            bool blank = k % 5 && strchr(" \n", old) && strchr(" \n\t\r", good[at]);
            good[at] = old;
            if (blank && !strcmp(names[i], "state.json")) continue; // means the same
            EXPECT_ERROR(sft_checkpoint_load(&r.m, &r.t, &r.config, folder), names[i]);
            assert_int_equal(test__status, SFT_BAD_INPUT);
        }
        sft_write_file(path, good, bytes);
        free(good);
    }
    sft__list_free(names, n);
    sft_checkpoint_load(&r.m, &r.t, &r.config, folder); // all is whole again
    // another model; another format
    json_object_set_new(r.m.arch.json, "layer_norm_epsilon", json_real(1e-3));
    EXPECT_ERROR(sft_checkpoint_load(&r.m, &r.t, &r.config, folder), "layer_norm_epsilon is 1e-5 there, 0.001 here");
    json_object_set_new(r.m.arch.json, "layer_norm_epsilon", json_real(1e-5));
    json_t *json = sft_json_file(sft_path(path, folder, "state.json"));
    json_object_set_new(json, "step", json_integer(7));
    sft__write_json(folder, "state.json", json);
    EXPECT_ERROR(sft_checkpoint_load(&r.m, &r.t, &r.config, folder), "checksum differs");
    json_object_set_new(json, "version", json_integer(2));
    sft__write_json(folder, "state.json", json);
    EXPECT_ERROR(sft_checkpoint_load(&r.m, &r.t, &r.config, folder), "version 2");
    json_decref(json);
    EXPECT_ERROR(sft_checkpoint_load(&r.m, &r.t, &r.config, r.model), "is not a checkpoint");
    EXPECT_ERROR(sft_checkpoint_load(&r.m, NULL, &r.config, r.model), "safetensors"); // no weights in there
    run_end(&r);
}

/* Other processes: this program again, told by the environment what to do. They are started afresh, not forked, so that
   they have threads of their own. */
static pid_t child(const char *what, const char *dir) {
    pid_t pid = fork();
    if (pid) return pid;
    setenv("SFT_STATE_CHILD", what, 1), setenv("SFT_STATE_DIR", dir, 1);
    freopen("/dev/null", "w", stderr);
    execl("/proc/self/exe", "test_state", NULL);
    _exit(99);
}
__attribute__((constructor)) static void child_main(void) {
    const char *what = getenv("SFT_STATE_CHILD");
    if (!what) return;
    Run *r = SFT_NEW(Run, 1);
    run_open(r, NULL, SFT_BF16, getenv("SFT_STATE_DIR"));
    r->config.save_total_limit = 2;
    r->config.resume_from_checkpoint = json_true();
    char *folder = sft_checkpoint_find(&r->config);
    sft_checkpoint_load(&r->m, &r->t, &r->config, folder);
    if (!strcmp(what, "forever"))
        for (int k = 0;; k++) r->t.step += k % 2, sft_checkpoint_save(&r->m, &r->t, &r->config); // every step twice
    if (!strcmp(what, "traced")) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGUSR1); // "count from here"
        sft_checkpoint_save(&r->m, &r->t, &r->config); // in the place of the one that is there
        r->t.step++;
        sft_checkpoint_save(&r->m, &r->t, &r->config);
        raise(SIGUSR2); // "done"
    }
    signal(SIGXFSZ, SIG_IGN); // a file that would grow past the limit: write fails, as on a full disk
    setrlimit(RLIMIT_FSIZE, &(struct rlimit){(rlim_t)atol(what), (rlim_t)atol(what)});
    r->t.step++;
    sft_checkpoint_save(&r->m, &r->t, &r->config);
    _exit(0);
}

static int64_t newest(const char *folder) { // the step that `latest` names
    char path[4096];
    char *text = sft_read_file(sft_path(path, folder, "latest"), NULL);
    int64_t step = atoll(text + 11);
    free(text);
    return step;
}

static void killed_at_any_moment_it_can_be_resumed(void **state) {
    (void)state;
    Run r;
    run_open(&r, llama, SFT_BF16, NULL);
    run_steps(&r, 2), sft_checkpoint_save(&r.m, &r.t, &r.config);
    r.config.resume_from_checkpoint = json_true();
    int64_t before = r.t.step;
    int n, left = 0, unfinished = 0;
    for (int k = 0; k < 50; k++) {
        pid_t pid = child("forever", r.dir);
        // it is saving now
        for (double start = sft_now(); newest(r.out) == before && sft_now() < start + 20;) usleep(200);
        usleep((useconds_t)(sft_random(3, (uint64_t)k, 0, 0) % 8000)); // a save takes about 2000 microseconds
        kill(pid, SIGKILL);
        int status;
        waitpid(pid, &status, 0);
        assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL); // it did not stop by itself
        char *folder = sft_checkpoint_find(&r.config);
        sft_checkpoint_load(&r.m, &r.t, &r.config, folder);
        assert_true(r.t.step >= before);
        before = r.t.step;
        free(folder);
        char **names = sft__list(r.out, &n);
        for (int i = 0; i < n; i++) unfinished += strstr(names[i], ".tmp") != NULL;
        sft__list_free(names, n);
    }
    assert_true(unfinished > 5); // or it was hardly ever killed while it was saving
    run_steps(&r, 1), sft_checkpoint_save(&r.m, &r.t, &r.config);
    char **names = sft__list(r.out, &n);
    for (int i = 0; i < n; i++) left += strstr(names[i], "tmp") != NULL;
    assert_int_equal(left, 0); // what the killed ones left is gone
    sft__list_free(names, n);
    run_end(&r);
}

// Two saves, stopped when they enter and leave every system call: what is on the disk then is what a kill would leave.
static void at_every_system_call_it_could_be_resumed(void **state) {
    (void)state;
    Run r;
    run_open(&r, gpt2, SFT_F32, NULL);
    run_steps(&r, 2), sft_checkpoint_save(&r.m, &r.t, &r.config);
    r.config.resume_from_checkpoint = json_true();
    int status, calls = 0;
    bool saving = false;
    pid_t pid = child("traced", r.dir);
    while (waitpid(pid, &status, 0) == pid && WIFSTOPPED(status) && WSTOPSIG(status) != SIGUSR2) {
        saving |= WSTOPSIG(status) == SIGUSR1;
        if (saving) {
            char *folder = sft_checkpoint_find(&r.config);
            json_decref(sft__checked_state(folder));
            free(folder);
            calls++;
        }
        ptrace(saving ? PTRACE_SYSCALL : PTRACE_CONT, pid, NULL, NULL);
    }
    assert_true(WIFSTOPPED(status)); // both saves were done
    kill(pid, SIGKILL), waitpid(pid, &status, 0);
    assert_true(calls > 200);
    assert_int_equal(newest(r.out), 3);
    // what a killed run can have left goes with the next save
    put(r.out, "latest.tmp99", ""), put(r.out, "kept.tmp", "");
    char path[4096];
    put(sft_path(path, r.out, "checkpoint-9.tmp"), "model.safetensors.tmp99", "");
    sft_checkpoint_save(&r.m, &r.t, &r.config);
    int n, left = 0;
    char **names = sft__list(r.out, &n);
    for (int i = 0; i < n; i++) left += strstr(names[i], "tmp") != NULL;
    assert_int_equal(left, 1); // kept.tmp is not ours
    sft__list_free(names, n);
    run_end(&r);
}

static void a_full_disk_loses_nothing(void **state) {
    (void)state;
    Run r;
    char path[4096];
    run_open(&r, llama, SFT_BF16, NULL);
    run_steps(&r, 2), sft_checkpoint_save(&r.m, &r.t, &r.config);
    r.config.resume_from_checkpoint = json_true();
    const char *const limits[] = {"0", "100", "5000", "13000", "25000"}; // in the first file, in the second, ...
    for (int i = 0; i < SFT_COUNT(limits); i++) {
        int status, n;
        waitpid(child(limits[i], r.dir), &status, 0);
        assert_true(WIFEXITED(status));
        assert_int_equal(WEXITSTATUS(status), SFT_BROKEN);
        char **names = sft__list(r.out, &n);
        assert_int_equal(n, 2); // checkpoint-2 and latest: the unfinished one is gone
        sft__list_free(names, n);
        char *folder = sft_checkpoint_find(&r.config);
        sft_checkpoint_load(&r.m, &r.t, &r.config, folder);
        free(folder);
    }
    int status;
    waitpid(child("1000000", r.dir), &status, 0);
    assert_int_equal(status, 0);
    assert_true(sft_exists(sft_path(path, r.out, "checkpoint-3")));
    // and in this process: the hook of whoever called is back in its place
    put(r.dir, "file", "");
    snprintf(path, sizeof path, "%s/file/out", r.dir);
    r.config.output_dir = path;
    EXPECT_ERROR(sft_checkpoint_save(&r.m, &r.t, &r.config), "file");
    run_end(&r);
}

static void export_writes_a_hugging_face_folder(void **state) {
    (void)state;
    Run r, back;
    char path[4096];
    run_open(&r, llama, SFT_F32, NULL);
    run_steps(&r, 2);
    put(r.model, "generation_config.json", "{\"temperature\": 0.5, \"eos_token_id\": 9}");
    put(r.out, "log.jsonl", "kept");
    sft_export(&r.m, NULL, NULL, &r.config, r.model, r.out);
    json_t *json = sft_json_file(sft_path(path, r.out, "config.json"));
    assert_string_equal(json_string_value(json_object_get(json, "torch_dtype")), "bfloat16"); // auto: as the source
    assert_int_equal(json_integer_value(json_object_get(json, "eos_token_id")), 2);
    assert_int_equal(json_integer_value(json_object_get(json, "intermediate_size")), 20);
    json_decref(json);
    json = sft_json_file(sft_path(path, r.out, "generation_config.json"));
    assert_true(json_real_value(json_object_get(json, "temperature")) == 0.5);
    assert_int_equal(json_integer_value(json_object_get(json, "eos_token_id")), 2);
    assert_int_equal(json_integer_value(json_object_get(json, "pad_token_id")), 2);
    json_decref(json);
    char *text = sft_read_file(sft_path(path, r.out, "log.jsonl"), NULL);
    assert_string_equal(text, "kept");
    free(text);
    run_open(&back, llama, SFT_F32, NULL); // init_from: another run takes the exported weights
    sft_checkpoint_load(&back.m, NULL, &back.config, r.out);
    for (int64_t i = 0; i < r.m.unit[1].count; i++) {
        uint16_t a, b;
        sft_from_f32(&a, SFT_BF16, &r.m.unit[1].master[i], 1);
        sft_from_f32(&b, SFT_BF16, &back.m.unit[1].master[i], 1);
        assert_true(a == b);
    }
    r.config.export_dtype = "float32", r.config.max_shard_size = 3000;
    sft_export(&r.m, NULL, NULL, &r.config, r.model, r.out);
    assert_true(sft_exists(sft_path(path, r.out, "model.safetensors.index.json")));
    sft_checkpoint_load(&back.m, NULL, &back.config, r.out);
    for (int64_t u = 0; u < r.m.units; u++)
        assert_memory_equal(r.m.unit[u].master, back.m.unit[u].master, (size_t)r.m.unit[u].count * 4);
    run_end(&r), run_end(&back);
}

// A user template with two stop tokens, on a tokenizer whose own end is another one.
static void export_says_what_was_trained(void **state) {
    (void)state;
    Run r;
    char path[4096];
    run_open(&r, llama, SFT_F32, NULL);
    size_t n;
    char *text = sft_read_file("test/golden/template_bytes.json", &n);
    sft_write_file(sft_path(path, r.model, "tokenizer.json"), text, n);
    free(text);
    put(r.model, "tokenizer_config.json",
        "{\"eos_token\": \"<|endoftext|>\", \"pad_token\": {\"content\": \"<|end_of_text|>\"}, \"chat_template\": "
        "\"old\", \"model_max_length\": 1000000000000000019884624838656}"); // as Llama 3's and Mistral's
    put(r.model, "special_tokens_map.json", "{\"eos_token\": {\"content\": \"<|endoftext|>\"}}");
    put(r.model, "chat_template.jinja", "old");
    SftTokenizer *t = sft_tokenizer_load(r.model);
    json_t *plain = json_pack("{s:s, s:s, s:[s, s]}", "user", "<|im_start|>{user}", "assistant", "{assistant}", "stop",
                              "<|im_end|>", "<|eot_id|>");
    SftTemplate *tpl = sft_template(t, NULL, plain);
    const int32_t *stops;
    int given = sft_template_stops(tpl, &stops); // the two, and the tokenizer's own
    assert_true(given == 3 && stops[0] == sft_token_id(t, "<|im_end|>"));
    sft_export(&r.m, t, tpl, &r.config, r.model, r.out);
    json_t *json = sft__read_json(r.out, "generation_config.json"), *eos = json_object_get(json, "eos_token_id");
    assert_int_equal(json_array_size(eos), given + 1);
    for (int i = 0; i < given; i++) assert_int_equal(json_integer_value(json_array_get(eos, (size_t)i)), stops[i]);
    assert_int_equal(json_integer_value(json_array_get(eos, (size_t)given)), 2); // config.json's comes last
    assert_int_equal(json_integer_value(json_object_get(json, "pad_token_id")), sft_token_id(t, "<|end_of_text|>"));
    json_t *config = sft__read_json(r.out, "config.json");
    assert_true(json_equal(json_object_get(config, "eos_token_id"), eos));
    json_decref(json), json_decref(config);
    const char *const files[] = {"tokenizer_config.json", "special_tokens_map.json"};
    for (int i = 0; i < 2; i++) {
        json = sft__read_json(r.out, files[i]);
        assert_string_equal(json_string_value(json_object_get(json, "eos_token")), "<|im_end|>");
        if (!i) assert_string_equal(json_string_value(json_object_get(json, "chat_template")), sft_template_jinja(tpl));
        json_decref(json);
    }
    text = sft_read_file(sft_path(path, r.out, "chat_template.jinja"), NULL);
    assert_string_equal(text, sft_template_jinja(tpl));
    free(text);
    SftTokenizer *again = sft_tokenizer_load(r.out); // and the exported folder is understood by this program, too
    SftTemplate *same = sft_template(again, NULL, plain);
    assert_int_equal(sft_eos(again), stops[0]);
    sft_export(&r.m, again, same, &r.config, r.out, r.out); // onto itself
    assert_true(sft_exists(sft_path(path, r.out, "tokenizer.json")));
    sft_template_free(tpl), sft_template_free(same), sft_tokenizer_free(t), sft_tokenizer_free(again),
        json_decref(plain);
    run_end(&r);
}

SFT_TEST_MAIN(cmocka_unit_test(a_resumed_run_has_the_same_bits), cmocka_unit_test(a_checkpoint_holds_what_it_says),
              cmocka_unit_test(finding_says_what_is_there), cmocka_unit_test(damage_is_found),
              cmocka_unit_test(killed_at_any_moment_it_can_be_resumed),
              cmocka_unit_test(at_every_system_call_it_could_be_resumed), cmocka_unit_test(a_full_disk_loses_nothing),
              cmocka_unit_test(export_writes_a_hugging_face_folder), cmocka_unit_test(export_says_what_was_trained))
