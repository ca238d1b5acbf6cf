// [2] config: the option table, the run file, the command line, DeepSpeed's JSON.
#include "test.h"

static char folder[64], file[128], beside[128];

static int setup(void **state) {
    (void)state;
    strcpy(folder, "/tmp/sft_config_XXXXXX");
    if (!mkdtemp(folder)) return 1;
    snprintf(file, sizeof file, "%s/run.json", folder);
    snprintf(beside, sizeof beside, "%s/ds.json", folder);
    return 0;
}
static int teardown(void **state) {
    (void)state;
    unlink(file), unlink(beside);
    return rmdir(folder);
}

// Reads the run file `json` (NULL: none) with these arguments. `export A B` asks for no model and no data.
#define READ(json, ...) read_config(json, (char *[]){"train_gpt2", __VA_ARGS__, NULL})
#define EXPORT(json, ...) READ(json, "export", file, "A", "B", ##__VA_ARGS__)
#define TRAIN "\"model_name_or_path\": \"m\", \"train_file\": \"f\", \"output_dir\": \"o\""
static SftConfig read_config(const char *json, char **argv) {
    int argc = 0;
    if (json) { // not sft_write_file: this runs hundreds of times, and fsync takes its time
        FILE *f = fopen(file, "w");
        assert_true(f && fputs(json, f) >= 0 && fclose(f) == 0);
    }
    while (argv[argc]) argc++;
    return sft_config(argc, argv);
}

static char *value_of(const SftConfig *c, const char *key) { // as JSON text
    static char text[512];
    json_t *all = sft_config_json(c), *v = json_object_get(all, key);
    assert_non_null(v);
    char *s = json_dumps(v, JSON_ENCODE_ANY | JSON_COMPACT | JSON_REAL_PRECISION(12));
    snprintf(text, sizeof text, "%s", s);
    free(s), json_decref(all);
    return text;
}
static void expect(const char *json, const char *key, const char *value) {
    SftConfig c = EXPORT(json);
    assert_string_equal(value_of(&c, key), value);
    sft_config_free(&c);
}

// A value that the option takes and that is not its default, as JSON text.
static void another(char out[64], const SftOption *o) {
    bool text = o->kind == SFT__STR;
    if (o->kind == SFT__BOOL)
        strcpy(out, !strcmp(o->standard, "true") ? "false" : "true");
    else if (o->kind == SFT__INT)
        snprintf(out, 64, "%.0f", SFT_MIN(o->low + 3, o->high));
    else if (o->kind == SFT__REAL)
        snprintf(out, 64, "%.12g", o->high < 1 ? o->high / 2 : o->low + 0.5);
    else if (o->kind == SFT__JSON && sft__option_among(o->words, "object")) strcpy(out, "{}");
    else if (o->kind == SFT__JSON)
        strcpy(out, sft__option_among(o->words, "list") ? "[\"a\"]" : "\"some text\"");
    else if (!o->words)
        strcpy(out, "\"some text\"");
    if (!text || !o->words) return;
    for (const char *w = o->words; *w; w += strcspn(w, "|") + 1) {
        snprintf(out, 64, "\"%.*s\"", (int)strcspn(w, "|"), w);
        if (strcmp(out, o->standard)) return;
    }
}

static void every_option_is_read_from_file_and_command_line(void **state) {
    (void)state;
    int options = 0;
    for (int i = 0; i < SFT_COUNT(sft__option); i++) {
        const SftOption *o = &sft__option[i];
        if (o->kind == SFT__TITLE) continue;
        const char *key = sft__option_name(o);
        char value[64], json[200], argument[200], plain[64];
        another(value, o);
        SftConfig c = EXPORT("{}");
        if (!strcmp(o->standard, "NULL"))
            assert_string_equal(value_of(&c, key), "null");
        else if (o->kind == SFT__INT || o->kind == SFT__REAL)
            assert_true(atof(value_of(&c, key)) == atof(o->standard));
        else
            assert_string_equal(value_of(&c, key), o->standard);
        if (strcmp(value, value_of(&c, key)) == 0) fail_msg("%s: %s is the default", key, value);
        sft_config_free(&c);

        snprintf(json, sizeof json, "{\"%s\": %s}", key, value);
        expect(json, key, value);
        snprintf(plain, sizeof plain, "%.*s", (int)strlen(value) - 2 * (*value == '"'),
                 value + (*value == '"'));
        snprintf(argument, sizeof argument, "--%s=%s", key, plain);
        c = EXPORT("{}", argument);
        assert_string_equal(value_of(&c, key), value);
        sft_config_free(&c);
        snprintf(argument, sizeof argument, "--%s", key);
        c = EXPORT("{}", argument, plain);
        assert_string_equal(value_of(&c, key), value);
        sft_config_free(&c);
        if (!strcmp(o->standard, "NULL")) { // null unsets what the file set
            c = EXPORT(json, argument, "null");
            assert_string_equal(value_of(&c, key), "null");
            sft_config_free(&c);
        }

        // A wrong type, and numbers beyond the ends.
        const char *wrong = o->kind == SFT__STR || o->kind == SFT__JSON ? "7" : "\"7\"";
        snprintf(json, sizeof json, "{\n\"%s\": %s}", key, wrong);
        EXPECT_ERROR(EXPORT(json), "line 2, column 1: ");
        assert_int_equal(test__status, SFT_BAD_INPUT);
        assert_non_null(strstr(test__line, key));
        if (o->kind == SFT__INT || o->kind == SFT__REAL) {
            double beyond[] = {o->low - 1, o->high * 1.5 + 1};
            for (int k = 0; k < 2; k++) {
                snprintf(json, sizeof json, "{\"%s\": %.17g}", key, beyond[k]);
                EXPECT_ERROR(EXPORT(json), key);
            }
        }
        options++;
    }
    assert_true(options > 60);
}

static void defaults_are_the_documented_ones(void **state) {
    (void)state;
    static const char *const defaults[][2] = {{"learning_rate", "2e-5"},
                                              {"lr_scheduler_type", "\"linear\""},
                                              {"warmup_steps", "0"},
                                              {"weight_decay", "0.0"},
                                              {"adam_beta1", "0.9"},
                                              {"adam_beta2", "0.999"},
                                              {"adam_epsilon", "1e-8"},
                                              {"max_grad_norm", "1.0"},
                                              {"num_train_epochs", "3.0"},
                                              {"per_device_train_batch_size", "8"},
                                              {"max_length", "1024"},
                                              {"packing", "false"},
                                              {"gradient_checkpointing", "false"},
                                              {"shuffle", "true"},
                                              {"seed", "42"},
                                              {"logging_steps", "1"},
                                              {"save_steps", "500"},
                                              {"eval_steps", "0"},
                                              {"bf16", "false"},
                                              {"fp16", "null"}};
    for (int i = 0; i < SFT_COUNT(defaults); i++) expect("{}", defaults[i][0], defaults[i][1]);
}

static void the_command_line_wins(void **state) {
    (void)state;
    SftConfig c = READ("{" TRAIN ", \"learning_rate\": 1e-3, \"packing\": true, \"fp16\": true}", file,
                       "--learning-rate", "2e-3", "--packing", "false", "--shuffle=false", "--max_steps",
                       "-1", "--max_samples", "1e3", "--bf16", "--fp16", "false", "--template", "chatml");
    assert_string_equal(c.command, "train");
    assert_string_equal(c.file_name, file);
    assert_true(c.learning_rate == 2e-3 && !c.packing && !c.shuffle && c.max_steps == -1 &&
                c.max_samples == 1000 && c.bf16 && !c.fp16);
    assert_int_equal(c.type, SFT_BF16);
    assert_string_equal(json_string_value(c.template_), "chatml");
    sft_config_free(&c);
    c = EXPORT("{}", "--train_file", "[\"a\", {\"path\": \"b\", \"weight\": 2}]", "--validation_file", "123",
               "--resume_from_checkpoint", "--packing");
    assert_string_equal(value_of(&c, "train_file"), "[\"a\",{\"path\":\"b\",\"weight\":2}]");
    assert_string_equal(value_of(&c, "validation_file"), "\"123\""); // a file may have such a name
    assert_true(json_is_true(c.resume_from_checkpoint) && c.packing);
    sft_config_free(&c);
    c = EXPORT("{}", "--resume_from_checkpoint", "out/checkpoint-3", "--fp16");
    assert_string_equal(json_string_value(c.resume_from_checkpoint), "out/checkpoint-3");
    assert_int_equal(c.type, SFT_F16);
    sft_config_free(&c);
}

static void commands_and_their_arguments(void **state) {
    (void)state;
    SftConfig c = READ(NULL, "generate", "m", "--raw", "--", "--what?");
    assert_string_equal(c.command, "generate");
    assert_int_equal(c.nargs, 2);
    assert_string_equal(c.args[0], "m");
    assert_string_equal(c.args[1], "--what?");
    assert_string_equal(c.model_name_or_path, "m");
    assert_true(c.raw && !c.file_name);
    sft_config_free(&c);
    c = READ("{" TRAIN "}", file, "--json");
    assert_true(!strcmp(c.command, "train") && c.json);
    sft_config_free(&c);
    c = READ("{" TRAIN "}", "estimate", file);
    assert_string_equal(c.command, "estimate");
    sft_config_free(&c);
    c = READ(NULL, "eval", "m", "--validation_file", "v");
    assert_string_equal(c.model_name_or_path, "m");
    sft_config_free(&c);
    c = READ(NULL, "train", "--learning_rate", "1", "--help");
    assert_string_equal(c.command, "help");
    sft_config_free(&c);
    c = READ(NULL, "--model_name_or_path", "m", "--train_file", "f", "--output_dir",
             "o"); // no run file, and no embedded default
    assert_null(c.file_name);
    sft_config_free(&c);
    EXPECT_ERROR(READ(NULL, "data", "--train-file", "f"), "model_name_or_path is missing"); // as any option is spelt
    EXPECT_ERROR(READ(NULL, "data", "--data_files", "f"), "model_name_or_path is missing");
    EXPECT_ERROR(READ(NULL, "trian"), "the nearest command is train");
    EXPECT_ERROR(READ(NULL, "merge", "a", "b"), "no command merge");
    EXPECT_ERROR(READ(NULL, "generate", "m"), "needs a prompt");
    EXPECT_ERROR(READ(NULL, "export", "m"), "CHECKPOINT FOLDER");
    EXPECT_ERROR(READ(NULL, "eval", "m", "--train_file", "f", "--validation_split", "0.5"),
                 "validation_file is missing");
    EXPECT_ERROR(READ(NULL, "chat"), "model_name_or_path is missing");
    EXPECT_ERROR(READ(NULL, "tokenize", "m", "a", "b"), "does not take the argument \"b\"");
    EXPECT_ERROR(READ("{" TRAIN "}", file, "more.txt"), "nor is there such a file");
    EXPECT_ERROR(READ("{\"model_name_or_path\": \"m\"}", file), "train_file is missing");
    EXPECT_ERROR(READ("{\"train_file\": \"m\"}", "data", file), "model_name_or_path is missing");
    EXPECT_ERROR(READ(NULL, "train", "nothere.json"), "nothere.json");
    EXPECT_ERROR(READ("{}", file, "--learning_rat", "1"),
                 "--learning_rat is not an option; the nearest is learning_rate");
    EXPECT_ERROR(READ("{}", file, "--learning_rate"), "needs a value");
    EXPECT_ERROR(READ("{}", file, "--learning_rate", "--packing"), "needs a value");
    EXPECT_ERROR(READ("{}", file, "--learning_rate", "nan"),
                 "--learning_rate must be a number from 0 to 10, got \"nan\"");
    EXPECT_ERROR(READ("{}", file, "--max_steps", "3x"), "--max_steps must be a whole number");
    EXPECT_ERROR(READ("{}", file, "--max_steps", "3x", "--max_steps", "3"), "--max_steps must be a whole number");
    EXPECT_ERROR(READ("{}", file, "--seed", "99999999999999999999"), "--seed must be");
    EXPECT_ERROR(READ("{}", file, "--packing=yes"), "--packing must be true or false");
    EXPECT_ERROR(READ("{}", file, "--template", "{\"user\": "), "--template, column");
    EXPECT_ERROR(READ("{}", file, "--output_dir", "\xff\xfe"), "not UTF-8");
}

static void errors_say_where(void **state) {
    (void)state;
    static const char *const wrong[][2] = {
        {"{\n \"learning_rat\": 1}",
         "run.json, line 2, column 2: learning_rat is not an option; the nearest is learning_rate"},
        {"{\"gradient_acumulation_step\": 1}", "the nearest is gradient_accumulation_steps"},
        {"{\"qqqqqqqq\": 1}", "see train_gpt2 help"},
        {"{\"deepspeed.train_batch_size\": 8}", "deepspeed.train_batch_size is not an option"}, // that is no section
        {"{\n\n   \"learning_rate\": \"2e-5\"}", "line 3, column 4: learning_rate must be a number from 0 to "
                                                 "10, got \"2e-5\"; write it without quotes"},
        {"{\"learning_rate\": \"auto\"}", "only DeepSpeed's JSON has \"auto\""},
        {"{\"max_length\": 5.5}", "max_length must be a whole number"},
        {"{\"max_length\": null}", "leave the key out"},
        {"{\"max_steps\": -2}", "at least -1"},
        {"{\"packing\": 1}", "packing must be true or false, got 1"},
        {"{\"save_strategy\": \"stepps\"}", "save_strategy must be one of steps|epoch|no, got \"stepps\""},
        {"{\"columns\": []}", "columns must be of type object"},
        {"{\"max_length\": 8, \"max_seq_length\": 8}", "max_length is given twice"},
        {"{\"packing\": true, \"packing\": false}", "duplicate object key"},
        {"{\"packing\": True}", "JSON writes true, false and null"},
        {"{\"packing\": true,\n}", "line 2, column 1: string or '}' expected near '}': a trailing comma"},
        {"{\"train_file\": [\"a\", ]}", "a trailing comma"},
        {"{'packing': true}", "double quotes"},
        {"{\"packing\": true // why\n}", "JSON has no comments"},
        {"{\"packing\": true} x", "end of file expected"},
        {"[1]", "must be a JSON object"},
        {"", "end of file"},
        {"{\"output_dir\": \"\xff\"}", "line 1"},
        {"{\"fp16\": true, \"bf16\": true}", "fp16 and bf16 are both on"},
        {"{\"resume_from_checkpoint\": true, \"init_from\": \"x\"}", "exclude each other"},
        {"{\"resume_from_checkpoint\": true, \"overwrite_output_dir\": true}", "exclude each other"},
        {"{\"validation_file\": \"x\", \"validation_split\": 0.1}", "exclude each other"},
        {"{\"validation_split\": 1.5}", "a share below 1 or a whole number"},
        {"{" TRAIN ", \"eval_steps\": 5}", "nothing to evaluate"},
        {"{\"neftune_noise_alpha\": 5}", "neftune_noise_alpha is 5: "},
        {"{\"optim\": \"adafactor\"}", "optim is adafactor: the optimizer is AdamW"},
        {"{\"group_by_length\": true}", "group_by_length is true: "},
        {"{\"fp16\": {\"loss_scale_windw\": 5}}",
         "column 11: fp16.loss_scale_windw is not an option of fp16; the nearest is loss_scale_window"},
        {"{\"fp16\": {\"loss_scale_window\": 0}}",
         "\"loss_scale_window\" must be a whole number from 1"},
        {"{\"fp16\": {\"min_loss_scale\": 0}}", "\"min_loss_scale\" must be"},
        {"{\"fp16\": {\"hysteresis\": 0}}", "\"hysteresis\" must be"},
        {"{\"fp16\": {\"initial_scale_power\": 25}}", "from 0 to 24"},
        {"{\"fp16\": {\"loss_scale\": true}}", "\"loss_scale\" must be a number"},
        {"{\"fp16\": {\"auto_cast\": true}}", "fp16.auto_cast must be false"},
    };
    for (int i = 0; i < SFT_COUNT(wrong); i++) {
        EXPECT_ERROR(READ(wrong[i][0], file, "--model_name_or_path=m"), wrong[i][1]);
        assert_int_equal(test__status, SFT_BAD_INPUT);
    }
    expect("\xef\xbb\xbf{\"seed\": 7}", "seed", "7"); // a byte-order mark is no error
    expect("{\"evaluation_inputs\": \"hi\"}", "evaluation_inputs", "[\"hi\"]"); // one prompt is a list of one
    expect("{\"max_length\": 2e3}", "max_length", "2000");
    expect("{\"fp16\": {\"enabled\": false}}", "fp16", "null");
    expect("{\"fp16\": {\"loss_scale\": 128}}", "fp16", "{\"loss_scale\":128}");
}

// Every name of the table of other names: accepted under its option, noted as harmless, or passed and refused
// as it says.
static void other_names_do_what_their_row_says(void **state) {
    (void)state;
    for (int i = 0; i < SFT_COUNT(sft__other); i++) {
        const SftOther *row = &sft__other[i];
        for (const char *w = row->names, *end; *w; w = end + (*end == '|')) {
            char json[300], value[64] = "\"nonsense\"", key[64];
            const SftOther *found;
            end = w + strcspn(w, "|");
            snprintf(key, sizeof key, "%.*s", (int)strcspn(w, "|="), w);
            const SftOption *o = sft__option_meant(row->prefix, key, &found);
            assert_ptr_equal(found, row); // no row, and no option, hides another one's name
            assert_int_equal(o != NULL, w[strlen(key)] == '=');
            if (*row->prefix) continue;
            if (o) another(value, o);
            snprintf(json, sizeof json, "{\"%s\": %s}", key, value);
            if (o) expect(json, sft__option_name(o), value);
            else if (!strcmp(row->same, "*")) expect(json, "seed", "42");
            else EXPECT_ERROR(EXPORT(json), row->why);
            if (o || !strcmp(row->same, "*")) continue;
            for (const char *s = row->same; *s; s += strcspn(s, "|"), s += *s == '|') {
                int n = (int)strcspn(s, "|");
                snprintf(value, sizeof value, "%.*s", n, s);
                bool bare = strchr("0123456789", *s) || sft__option_among("null|true|false", value);
                snprintf(json, sizeof json, bare ? "{\"%s\": %.*s}" : "{\"%s\": \"%.*s\"}", key, n, s);
                expect(json, "seed", "42");
            }
        }
    }
}

#define DS(json) "{\"deepspeed\": " json "}"
static void deepspeed_sets_what_the_run_leaves_open(void **state) {
    (void)state;
    const char *json =
        "{\"learning_rate\": 1e-4, \"warmup_steps\": 10, \"deepspeed\": {\"train_micro_batch_size_per_gpu\": "
        "2, \"train_batch_size\": 8,"
        "\"gradient_accumulation_steps\": \"auto\", \"gradient_clipping\": 0.5, \"steps_per_print\": 10, "
        "\"zero_optimization\": {\"stage\": 0, \"overlap_comm\": true},"
        "\"scheduler\": {\"type\": \"WarmupDecayLR\", \"params\": {\"warmup_min_lr\": \"auto\", "
        "\"warmup_max_lr\": \"auto\", \"warmup_num_steps\": \"auto\", \"total_num_steps\": \"auto\"}},"
        "\"optimizer\": {\"type\": \"AdamW\", \"params\": {\"lr\": \"auto\", \"betas\": [0.8, 0.95], "
        "\"eps\": 1e-7, \"weight_decay\": 0.1}},"
        "\"fp16\": {\"enabled\": true, \"loss_scale\": 0, \"initial_scale_power\": 12, \"hysteresis\": "
        "\"auto\"}, \"bf16\": {\"enabled\": false}}}";
    SftConfig c = EXPORT(json);
    assert_true(c.per_device_train_batch_size == 2 && c.gradient_accumulation_steps == 4 &&
                c.max_grad_norm == 0.5);
    assert_true(c.learning_rate == 1e-4 && c.adam_beta1 == 0.8 && c.adam_beta2 == 0.95 &&
                c.adam_epsilon == 1e-7 && c.weight_decay == 0.1);
    assert_int_equal(c.type, SFT_F16);
    assert_string_equal(c.lr_scheduler_type, "WarmupDecayLR");
    assert_string_equal(value_of(&c, "lr_scheduler_kwargs"),
                        "{\"warmup_min_lr\":\"auto\",\"warmup_max_lr\":\"auto\",\"warmup_num_steps\":"
                        "\"auto\",\"total_num_steps\":\"auto\"}");
    assert_string_equal(value_of(&c, "fp16"), "{\"loss_scale\":0,\"initial_scale_power\":12}");
    json_t *manifest = sft_config_json(&c); // the manifest is a run file, and means the same
    assert_int_equal(json_dump_file(manifest, file, JSON_INDENT(1)), 0);
    SftConfig again = read_config(NULL, (char *[]){"train_gpt2", "export", file, "A", "B", NULL});
    json_t *second = sft_config_json(&again);
    assert_true(json_equal(manifest, second));
    json_decref(manifest), json_decref(second);
    sft_config_free(&c), sft_config_free(&again);
    // "auto" follows the run, wherever the run stands
    c = EXPORT(DS("{\"fp16\": {\"enabled\": \"auto\", \"loss_scale_window\": 100}, \"bf16\": {\"enabled\": "
                  "\"auto\"}}"),
               "--fp16");
    assert_string_equal(value_of(&c, "fp16"), "{\"loss_scale_window\":100}");
    sft_config_free(&c);
    c = EXPORT(DS("{\"fp16\": {\"enabled\": \"auto\"}, \"bfloat16\": {\"enabled\": \"auto\"}}"), "--bf16");
    assert_true(c.bf16 && !c.fp16);
    sft_config_free(&c);
    c = EXPORT(DS("{\"train_batch_size\": 6}"));
    assert_true(c.per_device_train_batch_size == 6 && c.gradient_accumulation_steps == 1);
    sft_config_free(&c);
    c = EXPORT(DS("{\"train_batch_size\": 6}"), "--gradient_accumulation_steps", "3");
    assert_int_equal(c.per_device_train_batch_size, 2);
    sft_config_free(&c);
}

static void deepspeed_errors(void **state) {
    (void)state;
    static const char *const wrong[][2] = {
        {DS("{\"train_batch_size\": 32, \"train_micro_batch_size_per_gpu\": 4, "
            "\"gradient_accumulation_steps\": 3}"),
         "train_batch_size is 32, but per_device_train_batch_size 4 x gradient_accumulation_steps 3 x 1 "
         "process is 12"},
        {DS("{\"train_batch_size\": 1.5}"), "whole number of rows"},
        {DS("{\n\"gradient_clipp1ng\": 1}"),
         "line 2, column 1: deepspeed.gradient_clipp1ng is not an option; the nearest is gradient_clipping"},
        {DS("{\"zero_optimization\": {\"stage\": 2}}"),
         "deepspeed.zero_optimization.stage is 2: this version trains on one process"},
        {DS("{\"zero_optimization\": {\"stagee\": 0}}"), "the nearest is stage"},
        {DS("{\"zero_optimization\": true}"), "must be an object"},
        {DS("{\"zero_optimization\": {\"offload_optimizer\": {\"device\": \"cpu\"}}}"),
         "without sharding or offload"},
        {DS("{\"optimizer\": {\"type\": \"Lamb\"}}"), "the optimizer is AdamW"},
        {DS("{\"optimizer\": {\"params\": {\"max_grad_norm\": 1}}}"), "gradient_clipping"},
        {DS("{\"optimizer\": {\"params\": {\"betas\": [0.9]}}}"), "a list of two numbers"},
        {DS("{\"optimizer\": {\"params\": {\"betas\": [0.9, 2]}}}"), "betas must be a number from 0"},
        {DS("{\"scheduler\": {\"type\": \"WarmupCosine\"}}"), "scheduler.type must be one of"},
        {DS("{\"bf16\": {\"enabled\": true, \"loss_scale\": 0}}"),
         "deepspeed.bf16.loss_scale is not an option"},
        {DS("{\"fp16\": {\"enabled\": true, \"loss_scale_window\": 0}}"),
         "\"loss_scale_window\" must be"},
        {DS("{\"fp16\": {\"enabled\": 1}}"), "deepspeed.fp16.enabled must be true or false"},
        {DS("{\"fp16\": {\"enabled\": true}, \"bf16\": {\"enabled\": true}}"), "both on"},
        {DS("{\"amp\": {\"enabled\": true}}"), "deepspeed.amp is"},
        {DS("\"/nowhere/ds.json\""), "/nowhere/ds.json"},
    };
    for (int i = 0; i < SFT_COUNT(wrong); i++) {
        EXPECT_ERROR(EXPORT(wrong[i][0]), wrong[i][1]);
        assert_int_equal(test__status, SFT_BAD_INPUT);
    }
    // All that disagrees stands in one message.
    const char *both = "{\"learning_rate\": 1e-4, \"max_grad_norm\": 1, \"fp16\": false, \"deepspeed\": "
                       "{\"gradient_clipping\": 0.5,"
                       "\"fp16\": {\"enabled\": true}, \"optimizer\": {\"params\": {\"lr\": 1e-3}}}}";
    EXPECT_ERROR(EXPORT(both), "deepspeed.optimizer.params.lr is 0.001, but learning_rate is 0.0001");
    assert_non_null(strstr(test__line, "deepspeed.gradient_clipping is 0.5, but max_grad_norm is 1"));
    assert_non_null(strstr(test__line, "deepspeed.fp16 is {}, but fp16 is false"));
    // In a file of its own, the place is in that file.
    sft_write_file(beside, "{\n\n  \"zero_optimisation\": {}\n}", 30);
    EXPECT_ERROR(EXPORT("{}", "--deepspeed", beside),
                 "ds.json, line 3, column 3: zero_optimisation is not an option");
}

static void the_embedded_default_is_found_beside_the_program(void **state) {
    (void)state;
    char program[100], data[100], path[200], cwd[4096];
    snprintf(program, sizeof program, "%s/train_gpt2", folder);
    snprintf(data, sizeof data, "%s/data", folder);
    snprintf(path, sizeof path, "%s/quickstart.json", data);
    assert_non_null(getcwd(cwd, sizeof cwd));
    assert_int_equal(chdir(folder), 0);
    EXPECT_ERROR(sft_config(1, (char *[]){"train_gpt2"}), "no run file was given");
    sft_make_folder(data);
    const char *json =
        "{\"model_name_or_path\": \"data/base\", \"train_file\": \"/abs\", \"output_dir\": \"out\"}";
    sft_write_file(path, json, strlen(json));
    SftConfig c = sft_config(3, (char *[]){"train_gpt2", "--max_steps", "5"});
    assert_true(c.max_steps == 5 && c.quickstart);
    assert_string_equal(c.model_name_or_path, "data/base");
    sft_config_free(&c);
    assert_int_equal(chdir("/"), 0);
    c = sft_config(2, (char *[]){program, "data"});
    char expected[200];
    snprintf(expected, sizeof expected, "%s/base", data);
    assert_string_equal(c.model_name_or_path, expected);
    assert_string_equal(value_of(&c, "train_file"), "\"/abs\"");
    assert_string_equal(c.output_dir, "out");
    sft_config_free(&c);
    assert_int_equal(chdir(cwd), 0);
    unlink(path), rmdir(data);
}

static void help_lists_every_option(void **state) {
    (void)state;
    char *text = NULL, *table = NULL;
    size_t n;
    FILE *out = open_memstream(&text, &n);
    sft_help(out);
    fclose(out);
    for (char *p = text; *p; p = strchr(p, '\n') + 1) {
        assert_non_null(strchr(p, '\n'));
        if (strcspn(p, "\n") > 100) fail_msg("longer than 100 columns: %.*s", (int)strcspn(p, "\n"), p);
        assert_true(p[strcspn(p, "\n")] && (strcspn(p, "\n") == 0 || p[strcspn(p, "\n") - 1] != ' '));
    }
    out = open_memstream(&table, &n);
    sft_help_markdown(out);
    fclose(out);
    for (int i = 0; i < SFT_COUNT(sft__option); i++) {
        if (sft__option[i].kind == SFT__TITLE) continue;
        char a[64], b[64];
        snprintf(a, sizeof a, "  --%s ", sft__option_name(&sft__option[i]));
        snprintf(b, sizeof b, "\n| `%s` | ", sft__option_name(&sft__option[i]));
        assert_non_null(strstr(text, a));
        assert_non_null(strstr(table, b));
        assert_true(*sft__option[i].help); // and says what it is
    }
    for (int i = 0; i < SFT_COUNT(sft__command); i++) assert_non_null(strstr(text, sft__command[i].name));
    free(text), free(table);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
SFT_TEST_MAIN(TEST(every_option_is_read_from_file_and_command_line), TEST(defaults_are_the_documented_ones),
              TEST(the_command_line_wins), TEST(commands_and_their_arguments), TEST(errors_say_where),
              TEST(other_names_do_what_their_row_says), TEST(deepspeed_sets_what_the_run_leaves_open),
              TEST(deepspeed_errors), TEST(the_embedded_default_is_found_beside_the_program),
              TEST(help_lists_every_option))
