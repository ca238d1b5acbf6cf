// [4] model: config.json, the tensor table, units, weights in and out. Golden files: test/golden/make_model.py.
#include "test.h"

#define GOLDEN "test/golden/model/"
static const char *const families[] = {"gpt2", "llama", "mistral", "qwen2", "qwen3", "internlm2"};

static char test_folder[] = "/tmp/sft_model_XXXXXX";
static int make_folder(void **state) {
    (void)state;
    return mkdtemp(test_folder) == NULL;
}
static int remove_folder(void **state) {
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -r %s", test_folder);
    return system(command);
}
static void put(const char *name, const char *text) {
    char path[4096];
    sft_write_file(sft_path(path, test_folder, name), text, strlen(text));
}
static void put_json(const char *name, json_t *json) {
    char *text = json_dumps(json, 0);
    put(name, text);
    free(text);
}
static void drop(const char *name) {
    char path[4096];
    unlink(sft_path(path, test_folder, name));
}

// Opens the units of a model with memory of exactly the planned size.
static SftModel open_model(SftArch arch, SftType type, bool trains) {
    SftModel m = {.arch = arch, .ops = &sft_cpu, .type = type, .trains = trains};
    sft_units_open(&m);
    for (int64_t i = 0; i < m.units; i++)
        assert_true(m.unit[i].weights == NULL && m.unit[i].w.norm1_w.data == NULL && m.unit[i].count > 0);
    sft_units_close(&m);
    for (int i = 0; i < SFT_MEMS; i++) {
        size_t bytes = m.mem[i].peak;
        sft_arena_open(&m.mem[i], "test", bytes);
    }
    sft_units_open(&m);
    for (int i = 0; i < SFT_MEMS; i++) assert_true(m.mem[i].used == m.mem[i].size);
    return m;
}
static void close_model(SftModel *m) {
    for (int i = 0; i < SFT_MEMS; i++) sft_arena_close(&m->mem[i]);
    sft_units_close(m);
    sft_arch_free(&m->arch);
}
static SftModel load_model(const char *folder, SftType type, bool trains) {
    SftModel m = open_model(sft_arch(folder), type, trains);
    sft_load_weights(&m, folder);
    return m;
}

static double number(json_t *o, const char *key) { return json_number_value(json_object_get(o, key)); }

// What transformers makes of a config.json is what sft_arch makes of it.
static void configs_as_transformers_reads_them(void **state) {
    (void)state;
    json_t *cases = sft_json_file(GOLDEN "configs.json"), *one, *id;
    size_t i, j;
    assert_true(json_array_size(cases) > 30);
    json_array_foreach(cases, i, one) {
        json_t *e = json_object_get(one, "expect");
        put_json("config.json", json_object_get(one, "config"));
        SftArch a = sft_arch(test_folder);
        const struct { const char *key; double got; } plain[] = {
            {"V", (double)a.V},   {"C", (double)a.C}, {"L", (double)a.L},
            {"P", (double)a.P},   {"H", (double)a.H}, {"K", (double)a.K},
            {"D", (double)a.D},   {"F", (double)a.F}, {"parameters", (double)sft_parameters(&a)},
            {"init", a.init_std}, {"bos", a.bos},     {"act", (double)a.act}};
        for (int k = 0; k < SFT_COUNT(plain); k++)
            if (plain[k].got != number(e, plain[k].key))
                fail_msg("case %zu, %s: %g, expected %g", i, plain[k].key, plain[k].got, number(e, plain[k].key));
        const struct { const char *key; bool got; } flags[] = {
            {"q_bias", a.q_bias}, {"o_bias", a.o_bias}, {"mlp_bias", a.mlp_bias},
            {"qk_norm", a.qk_norm}, {"tied", a.tied}};
        for (int k = 0; k < SFT_COUNT(flags); k++)
            if (flags[k].got != json_is_true(json_object_get(e, flags[k].key)))
                fail_msg("case %zu, %s: %d", i, flags[k].key, flags[k].got);
        assert_true(a.norm_eps == (float)number(e, "eps"));
        assert_true(fabs(a.attn_scale - number(e, "scale")) < 1e-7); // one rounding to fp32 of a number below 1
        assert_int_equal(a.neos, json_array_size(json_object_get(e, "eos")));
        json_array_foreach(json_object_get(e, "eos"), j, id) assert_int_equal(a.eos[j], json_integer_value(id));
        bool gpt2 = !strcmp(a.family, "gpt2");
        assert_true(a.layernorm == gpt2 && a.learned_positions == gpt2 && a.gated == !gpt2);
        if (!gpt2) {
            static const char *types[] = {"", "default", "linear", "dynamic", "llama3", "yarn"};
            assert_string_equal(types[a.rope], json_string_value(json_object_get(e, "rope")));
            assert_true(a.rope_theta == number(e, "theta"));
            assert_true(fabs(a.rope_attention - number(e, "attention")) < 1e-12);
            if (json_is_number(json_object_get(e, "factor"))) assert_true(a.rope_factor == number(e, "factor"));
            if (json_is_number(json_object_get(e, "original"))) assert_true(a.rope_original == number(e, "original"));
            if (a.rope == SFT_ROPE_DYNAMIC) assert_true(a.rope_original == (double)a.P);
            if (a.rope == SFT_ROPE_LLAMA3)
                assert_true(a.rope_low == number(e, "low") && a.rope_high == number(e, "high"));
            json_array_foreach(json_object_get(e, "windows"), j, id)
                assert_int_equal((int64_t)j >= a.window_from ? a.window : 0, json_integer_value(id));
        }
        sft_arch_free(&a);
    }
    json_decref(cases);
    put("config.json", "{\"model_type\":\"qwen3\",\"rope_parameters\":{\"rope_type\":\"yarn\",\"factor\":2,\"beta_"
                       "fast\":16,\"beta_slow\":2,\"truncate\":false}}");
    SftArch a = sft_arch(test_folder);
    assert_true(a.rope_beta_fast == 16 && a.rope_beta_slow == 2 && !a.rope_truncate);
    sft_arch_free(&a);
    put("config.json", "{\"model_type\":\"internlm2\"}"); // its own configuration_internlm2.py
    a = sft_arch(test_folder);
    assert_true(a.V == 103168 && a.K == 32 && a.D == 128 && a.F == 11008 && a.P == 2048 && a.q_bias && a.o_bias &&
                !a.mlp_bias && !a.tied && a.eos[0] == 2);
    sft_arch_free(&a);
}

static void stop_tokens_of_both_files(void **state) {
    (void)state;
    put("config.json", "{\"model_type\":\"llama\",\"eos_token_id\":[2,7]}");
    put("generation_config.json", "{\"eos_token_id\":[7,9,2]}");
    SftArch a = sft_arch(test_folder);
    assert_true(a.neos == 3 && a.eos[0] == 2 && a.eos[1] == 7 && a.eos[2] == 9);
    sft_arch_free(&a);
    put("generation_config.json", "{\"eos_token_id\":\"</s>\"}");
    EXPECT_ERROR(sft_arch(test_folder), "generation_config.json: \"eos_token_id\" is \"</s>\"");
    drop("generation_config.json");
}

static void bad_configs_are_refused(void **state) {
    (void)state;
    const struct { const char *config, *words; } bad[] = {
        {"[]", "\"model_type\" is missing: expected one of gpt2, llama, mistral, qwen2, qwen3, internlm2"},
        {"{\"model_type\":\"mamba\"}", "\"model_type\" is \"mamba\": expected one of"},
        {"{\"model_type\":\"mixtral\"}", "expected one of"},
        {"{\"model_type\":\"llama\",\"hidden_size\":0}", "\"hidden_size\" is 0: expected a whole number from 1"},
        {"{\"model_type\":\"llama\",\"hidden_size\":64.0}", "\"hidden_size\" is 64.0: expected a whole number"},
        {"{\"model_type\":\"llama\",\"hidden_size\":\"64\"}", "\"hidden_size\" is \"64\""},
        {"{\"model_type\":\"llama\",\"hidden_size\":null}", "\"hidden_size\" is missing"},
        {"{\"model_type\":\"llama\",\"hidden_size\":99999999999}", "\"hidden_size\" is 99999999999"},
        {"{\"model_type\":\"llama\",\"hidden_size\":100}", "a hidden size of 100 does not divide into 32 heads"},
        {"{\"model_type\":\"llama\",\"hidden_size\":96}", "heads of size 3"},
        {"{\"model_type\":\"llama\",\"head_dim\":0}", "heads of size 0"},
        {"{\"model_type\":\"llama\",\"num_key_value_heads\":5}", "32 attention heads cannot share 5"},
        {"{\"model_type\":\"llama\",\"vocab_size\":268435456,\"hidden_size\":16777216,\"num_hidden_layers\":65536}",
         "more than 1e15 parameters"},
        {"{\"model_type\":\"llama\",\"hidden_act\":\"relu\"}", "\"hidden_act\" is \"relu\": expected \"silu\""},
        {"{\"model_type\":\"llama\",\"hidden_act\":3}", "\"hidden_act\" is 3"},
        {"{\"model_type\":\"gpt2\",\"activation_function\":\"relu\"}", "\"activation_function\" is \"relu\""},
        {"{\"model_type\":\"gpt2\",\"n_layer\":-1}", "\"n_layer\" is -1"},
        {"{\"model_type\":\"gpt2\",\"add_cross_attention\":true}", "\"add_cross_attention\" is true"},
        {"{\"model_type\":\"gpt2\",\"num_key_value_heads\":4}",
         "\"num_key_value_heads\" is 4: expected 12, as every gpt2 model"},
        {"{\"model_type\":\"internlm2\",\"head_dim\":64}",
         "\"head_dim\" is 64: expected 128, as every internlm2 model"},
        {"{\"model_type\":\"mistral\",\"attention_bias\":true}", "\"attention_bias\" is true: expected false"},
        {"{\"model_type\":\"qwen2\",\"mlp_bias\":true}", "\"mlp_bias\" is true: expected false"},
        {"{\"model_type\":\"llama\",\"tie_word_embeddings\":1}",
         "\"tie_word_embeddings\" is 1: expected true or false"},
        {"{\"model_type\":\"llama\",\"quantization_config\":{\"bits\":4}}", "\"quantization_config\" is {\"bits\": 4}"},
        {"{\"model_type\":\"llama\",\"num_local_experts\":8}", "\"num_local_experts\" is 8"},
        {"{\"model_type\":\"llama\",\"partial_rotary_factor\":0.5}",
         "\"partial_rotary_factor\" is 0.5: expected a number from 1 to 1"},
        {"{\"model_type\":\"llama\",\"rope_parameters\":{\"partial_rotary_factor\":0.5}}",
         "\"partial_rotary_factor\" is 0.5"},
        {"{\"model_type\":\"llama\",\"rope_scaling\":{\"type\":\"longrope\",\"factor\":2}}",
         "\"rope_type\" is \"longrope\": expected"},
        {"{\"model_type\":\"llama\",\"rope_scaling\":{\"type\":\"linear\"}}", "\"factor\" is missing"},
        {"{\"model_type\":\"llama\",\"rope_scaling\":{\"type\":\"linear\",\"factor\":0}}", "\"factor\" is 0"},
        {"{\"model_type\":\"llama\",\"rope_scaling\":\"linear\"}",
         "\"rope_scaling\" is \"linear\": expected an object"},
        {"{\"model_type\":\"llama\",\"rope_parameters\":{\"full_attention\":{\"rope_type\":\"default\"}}}",
         "hold for all layers"},
        {"{\"model_type\":\"llama\",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2}}",
         "\"low_freq_factor\" is missing"},
        {"{\"model_type\":\"llama\",\"rope_scaling\":{\"type\":\"llama3\",\"factor\":2,\"low_freq_factor\":4,\"high_"
         "freq_factor\":4}}",
         "more than low_freq_factor"},
        {"{\"model_type\":\"llama\",\"hidden_size\":64,\"rope_scaling\":{\"type\":\"dynamic\",\"factor\":2}}",
         "heads of size 2"},
        {"{\"model_type\":\"llama\",\"rope_theta\":0}", "\"rope_theta\" is 0"},
        {"{\"model_type\":\"qwen3\",\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2,\"truncate\":1}}",
         "\"truncate\" is 1"},
        {"{\"model_type\":\"mistral\",\"sliding_window\":-1}", "\"sliding_window\" is -1"},
        {"{\"model_type\":\"qwen2\",\"num_hidden_layers\":2,\"layer_types\":[\"full_attention\"]}",
         "an entry for each layer"},
        {"{\"model_type\":\"qwen2\",\"num_hidden_layers\":2,\"layer_types\":[\"sliding_attention\",\"full_attention\"]"
         "}",
         "then \"sliding_attention\" layers"},
        {"{\"model_type\":\"qwen2\",\"num_hidden_layers\":2,\"layer_types\":[\"full_attention\",\"sliding_attention\"]"
         "}",
         "what sliding_window says"},
        {"{\"model_type\":\"mistral\",\"num_hidden_layers\":2,\"layer_types\":[\"full_attention\",\"sliding_"
         "attention\"]}",
         "what sliding_window says"},
        {"{\"model_type\":\"llama\",\"eos_token_id\":[1,2,3,4,5,6,7,8,9]}", "at most 8 different ids"},
        {"{\"model_type\":\"llama\",\"eos_token_id\":[-1]}", "\"eos_token_id\" is [-1]"},
        {"{\"model_type\":\"llama\",\"bos_token_id\":true}", "\"bos_token_id\" is true"},
        {"{\"model_type\":\"llama\",\"rms_norm_eps\":\"1e-5\"}", "\"rms_norm_eps\" is \"1e-5\": expected a number"},
    };
    for (int i = 0; i < SFT_COUNT(bad); i++) {
        put("config.json", bad[i].config);
        EXPECT_ERROR(sft_arch(test_folder), bad[i].words);
        if (!strstr(test__line, "/config.json")) fail_msg("the error does not name the file: %s", test__line);
        assert_int_equal(test__status, SFT_BAD_INPUT);
    }
    drop("config.json");
    EXPECT_ERROR(sft_arch(test_folder), "config.json is not there");
}

static void table_and_units_agree(void **state) {
    (void)state;
    for (int f = 0; f < SFT_COUNT(families); f++) {
        char folder[256], name[256];
        snprintf(folder, sizeof folder, GOLDEN "%s", families[f]);
        for (int trains = 0; trains < 2; trains++)
            for (SftType type = SFT_F32; type < SFT_TYPES; type++) {
                SftModel m = open_model(sft_arch(folder), type, trains);
                int64_t n = 0;
                for (int64_t i = 0; i < m.units; i++) {
                    SftUnit *u = &m.unit[i];
                    int64_t next = 0;
                    assert_true((u->master != NULL) == trains && (u->grad != NULL) == trains &&
                                (u->v != NULL) == trains);
                    if (trains) assert_true(((void *)u->master == u->weights) == (type == SFT_F32));
                    for (int s = 0; s < SFT_SLOTS; s++) {
                        SftTensor w = *sft_weight(&u->w, s), dw = *sft_weight(&u->dw, s);
                        SftSlotInfo t = sft_slot(&m.arch, s);
                        assert_string_equal(t.name, sft_slot_name(s));
                        assert_true((w.dim[0] > 0) == (u->offset[s] >= 0) &&
                                    (u->offset[s] >= 0) == (t.unit == u->kind && t.rows > 0));
                        if (u->offset[s] < 0) continue;
                        assert_int_equal(u->offset[s], next);
                        assert_true((u->offset[s] < u->decayed) == t.decay);
                        assert_true(w.type == type &&
                                    w.data == (char *)u->weights + (size_t)next * sft_type_size(type));
                        if (trains)
                            assert_true(dw.type == SFT_F32 && dw.data == u->grad + next && sft_size(dw) == sft_size(w));
                        next += sft_size(w);
                    }
                    assert_int_equal(u->count, next);
                    n += next;
                }
                assert_int_equal(n, sft_parameters(&m.arch));
                close_model(&m);
            }
        SftArch a = sft_arch(folder);
        for (int s = 0; s < SFT_SLOTS; s++) // every slot that the model has is in the files
            if (sft_slot(&a, s).rows && !sft_hf_name(&a, s, 1, name)[0])
                fail_msg("%s has no file name for %s", families[f], sft_slot_name(s));
        sft_arch_free(&a);
    }
    SftArch a = sft_arch(GOLDEN "qwen3");
    char name[256];
    assert_string_equal(sft_hf_name(&a, SFT_SLOT_q_w, 3, name), "model.layers.3.self_attn.q_proj.weight");
    sft_arch_free(&a);
}

// Each slot of a loaded model against the checksum that Python made of the same weights; then saved, byte for byte the
// same.
static void weights_load_and_save(void **state) {
    (void)state;
    for (int f = 0; f < SFT_COUNT(families); f++) {
        char folder[256], path[4096];
        snprintf(folder, sizeof folder, GOLDEN "%s", families[f]);
        json_t *slots = sft_json_file(sft_path(path, folder, "slots.json"));
        for (int trains = 0; trains < 2; trains++) {
            SftModel m = load_model(folder, trains ? SFT_BF16 : SFT_F32, trains);
            size_t found = 0;
            for (int64_t i = 0; i < m.units; i++)
                for (int s = 0; s < SFT_SLOTS; s++) {
                    SftUnit *u = &m.unit[i];
                    if (u->offset[s] < 0) continue;
                    char name[64];
                    snprintf(name, sizeof name, "%d.%s", (int)i, sft_slot_name(s));
                    json_t *want = json_object_get(slots, name);
                    SftTensor w = *sft_weight(&u->w, s);
                    const float *x = (trains ? u->master : (float *)u->weights) + u->offset[s];
                    double sum = 0, size = 0;
                    if (!want) fail_msg("%s: %s is not in slots.json", folder, name);
                    for (int64_t r = 0; r < w.dim[0]; r++)
                        for (int64_t c = 0; c < w.dim[1]; c++) {
                            double term = (double)x[r * w.dim[1] + c] * (double)((r * 31 + c * 17) % 97);
                            sum += term, size += fabs(term);
                            if (trains)
                                assert_int_equal(((uint16_t *)w.data)[r * w.dim[1] + c],
                                                 sft_f32_to_bf16(x[r * w.dim[1] + c]));
                        }
                    assert_true(json_integer_value(json_array_get(want, 0)) == w.dim[0] &&
                                json_integer_value(json_array_get(want, 1)) == w.dim[1]);
                    // Both sums are in double; only the order of adding may differ.
                    if (!(fabs(sum - json_number_value(json_array_get(want, 2))) <= 1e-12 * size))
                        fail_msg("%s: %s differs", folder, name);
                    found++;
                }
            assert_int_equal(found, json_object_size(slots));
            sft_save_weights(&m, test_folder, m.arch.source_type, f % 2 ? 4e3 : 5e9); // one file, or many
            SftSource ours = sft__source_open(test_folder), theirs = sft__source_open(folder);
            assert_true((ours.files > 1) == f % 2);
            int64_t left = 0;
            for (size_t i = 0; i < ours.files; i++) left += ours.file[i].n;
            for (size_t i = 0; i < theirs.files; i++)
                for (int64_t j = 0; j < theirs.file[i].n; j++, left--) {
                    const SftFileTensor *a = &theirs.file[i].tensor[j], *b = sft__source_find(&ours, a->name);
                    assert_string_equal(a->dtype, b->dtype);
                    assert_true(a->dims == b->dims && !memcmp(a->dim, b->dim, sizeof a->dim));
                    assert_memory_equal(a->data, b->data, a->bytes);
                }
            assert_int_equal(left, 0);
            sft__source_close(&ours), sft__source_close(&theirs);
            close_model(&m);
        }
        json_decref(slots);
    }
}

// Every source type to every type of computation, and saved in every type: as the conversions of [1] say.
static void weights_convert(void **state) {
    (void)state;
    for (int f = 0; f < SFT_COUNT(families); f++) {
        char folder[256];
        snprintf(folder, sizeof folder, GOLDEN "%s", families[f]);
        SftModel exact = load_model(folder, SFT_F32, false);
        char config[4096], path[4096];
        size_t n;
        char *text = sft_read_file(sft_path(config, folder, "config.json"), &n);
        sft_write_file(sft_path(path, test_folder, "config.json"), text, n);
        free(text);
        for (SftType type = SFT_F32; type < SFT_TYPES; type++)
            for (SftType saved = SFT_F32; saved < SFT_TYPES; saved++) {
                SftModel m = load_model(folder, type, false);
                sft_save_weights(&m, test_folder, saved, 5e9);
                SftModel back = load_model(test_folder, SFT_F32, true);
                assert_int_equal(back.arch.source_type, saved);
                for (int64_t i = 0; i < m.units; i++)
                    for (int64_t j = 0; j < m.unit[i].count; j++) {
                        float x = ((float *)exact.unit[i].weights)[j], y;
                        uint16_t h[2];
                        sft_from_f32(h, type, &x, 1), sft_to_f32(&y, h, type, 1);
                        sft_from_f32(h, saved, &y, 1), sft_to_f32(&y, h, saved, 1);
                        assert_true(back.unit[i].master[j] == y);
                    }
                close_model(&m), close_model(&back);
            }
        close_model(&exact);
    }
}

// Rewrites a golden model's tensors into the test folder: `more` first (NULL: none), without `without`, names cut by
// `cut`.
static void rewrite(const char *family, const char *without, const SftFileTensor *more, size_t cut) {
    char folder[256], path[4096];
    snprintf(folder, sizeof folder, GOLDEN "%s", family);
    SftSource s = sft__source_open(folder);
    SftFileTensor *t = SFT_NEW(SftFileTensor, s.file[0].n + 1);
    int64_t n = 0;
    assert_int_equal(s.files, 1);
    if (more) t[n++] = *more;
    for (int64_t i = 0; i < s.file[0].n; i++)
        if (!without || strcmp(without, s.file[0].tensor[i].name)) t[n] = s.file[0].tensor[i], t[n++].name += cut;
    sft_safetensors_write(sft_path(path, test_folder, "model.safetensors"), t, n, NULL, NULL, NULL);
    free(t);
    sft__source_close(&s);
}

static void wrong_files_are_refused(void **state) {
    (void)state;
    const float zeros[19 * 16] = {0};
    SftModel m = open_model(sft_arch(GOLDEN "gpt2"), SFT_F32, false);
    drop("model.safetensors"), drop("model.safetensors.index.json");
    EXPECT_ERROR(sft_load_weights(&m, test_folder), "no model.safetensors and no model.safetensors.index.json");
    put("pytorch_model.bin", "");
    EXPECT_ERROR(sft_load_weights(&m, test_folder), "from transformers import AutoModelForCausalLM");
    drop("pytorch_model.bin");
    rewrite("gpt2", "transformer.h.1.mlp.c_fc.bias", NULL, 0);
    EXPECT_ERROR(sft_load_weights(&m, test_folder),
                 "model.safetensors: tensor transformer.h.1.mlp.c_fc.bias is missing");
    SftFileTensor more = {
        .name = "transformer.h.1.mlp.c_fc.bias", .dtype = "F32", .dims = 2, .dim = {16, 2}, .data = (char *)zeros};
    rewrite("gpt2", more.name, &more, 0);
    EXPECT_ERROR(sft_load_weights(&m, test_folder),
                 "tensor transformer.h.1.mlp.c_fc.bias has the shape [16, 2]: config.json gives [64]");
    more = (SftFileTensor){
        .name = "transformer.h.1.mlp.c_fc.bias", .dtype = "U8", .dims = 1, .dim = {64}, .data = (char *)zeros};
    rewrite("gpt2", more.name, &more, 0);
    EXPECT_ERROR(sft_load_weights(&m, test_folder),
                 "tensor transformer.h.1.mlp.c_fc.bias has dtype U8: expected F32, BF16 or F16");
    const char *const inside[] = {"transformer.h.1.mlp.c_fc.weight.absmax",
                                  "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight", "h.0.attn.q_norm"};
    more = (SftFileTensor){.dtype = "F32", .dims = 1, .dim = {1}, .data = (char *)zeros};
    for (int i = 0; i < SFT_COUNT(inside); i++) {
        more.name = inside[i];
        rewrite("gpt2", NULL, &more, 0);
        EXPECT_ERROR(sft_load_weights(&m, test_folder), "is not part of a gpt2 model");
    }
    const char *const beside[] = {"transformer.h.0.attn.bias", "h.1.attn.masked_bias", "transformer.h.2.ln_1.weight",
                                  "score.weight"};
    for (int i = 0; i < SFT_COUNT(beside); i++) {
        more.name = beside[i];
        rewrite("gpt2", NULL, &more, 0);
        sft_load_weights(&m, test_folder);
    }
    more = (SftFileTensor){.name = "lm_head.weight", .dtype = "F32", .dims = 2, .dim = {19, 16}, .data = (char *)zeros};
    rewrite("gpt2", NULL, &more, 0);
    EXPECT_ERROR(sft_load_weights(&m, test_folder), "lm_head.weight differs from the embedding although");
    SftSafetensors f = sft_safetensors_open(GOLDEN "gpt2/model.safetensors");
    more.data = sft_safetensors_find(&f, "transformer.wte.weight")->data;
    rewrite("gpt2", NULL, &more, 0);
    sft_load_weights(&m, test_folder);
    sft_safetensors_close(&f);
    close_model(&m);
}

// As the files of GPT-2 on the hub, and of models saved without their head, have it; all data at odd bytes, too.
static void names_without_prefix_load(void **state) {
    (void)state;
    const SftFileTensor one = {.name = "one", .dtype = "U8", .dims = 1, .dim = {1}, .data = "x"};
    const struct {
        const char *family;
        size_t cut;
    } cases[] = {{"gpt2", strlen("transformer.")}, {"qwen2", strlen("model.")}, {"llama", 0}};
    for (int f = 0; f < SFT_COUNT(cases); f++) {
        char folder[256];
        snprintf(folder, sizeof folder, GOLDEN "%s", cases[f].family);
        rewrite(cases[f].family, NULL, &one, cases[f].cut);
        SftModel m = open_model(sft_arch(folder), SFT_F32, false), full = load_model(folder, SFT_F32, false);
        sft_load_weights(&m, test_folder);
        for (int64_t i = 0; i < m.units; i++)
            assert_memory_equal(m.unit[i].weights, full.unit[i].weights, (size_t)m.unit[i].count * 4);
        close_model(&m), close_model(&full);
    }
}

static void wrong_indices_are_refused(void **state) {
    (void)state;
    drop("model.safetensors");
    SftModel m = open_model(sft_arch(GOLDEN "qwen3"), SFT_F32, false);
    const struct { const char *index, *words; } bad[] = {
        {"[]", "expected an object \"weight_map\""},
        {"{\"weight_map\": [1]}", "expected an object \"weight_map\""},
        {"{\"weight_map\": {\"a\": 1}}", "a: expected a file beside it"},
        {"{\"weight_map\": {\"a\": \"../x.safetensors\"}}", "a: expected a file beside it"},
        {"{\"weight_map\": {\"a\": \"gone.safetensors\"}}", "gone.safetensors: No such file"},
        {"{\"weight_map\": {\"model.norm.weight\": \"a.safetensors\"}}",
         "tensor model.norm.weight is not in a.safetensors"},
        {"{\"weight_map\": {}}", "index.json: tensor model.embed_tokens.weight is missing"},
        {"{\"weight_map\": {\"x\": \"a.safetensors\"}}", "index.json: tensor model.embed_tokens.weight is missing"},
    };
    char path[4096];
    SftFileTensor t = {.name = "x", .dtype = "U8", .dims = 1, .dim = {1}, .data = "x"};
    sft_safetensors_write(sft_path(path, test_folder, "a.safetensors"), &t, 1, NULL, NULL, NULL);
    for (int i = 0; i < SFT_COUNT(bad); i++) {
        put("model.safetensors.index.json", bad[i].index);
        EXPECT_ERROR(sft_load_weights(&m, test_folder), bad[i].words);
    }
    close_model(&m);
    drop("model.safetensors.index.json");
}

static void random_weights(void **state) {
    (void)state;
    put("config.json", "{\"model_type\":\"qwen3\",\"vocab_size\":1001,\"hidden_size\":64,\"intermediate_size\":96,"
                       "\"num_hidden_layers\":2,\"num_attention_heads\":2,"
                       "\"num_key_value_heads\":2,\"attention_bias\":true,\"head_dim\":64}");
    SftModel m = open_model(sft_arch(test_folder), SFT_F32, true),
             same = open_model(sft_arch(test_folder), SFT_BF16, true),
             other = open_model(sft_arch(test_folder), SFT_BF16, false);
    sft_init_weights(&m, 42), sft_init_weights(&same, 42), sft_init_weights(&other, 43);
    for (int64_t i = 0; i < m.units; i++) {
        SftUnit *u = &m.unit[i];
        assert_memory_equal(u->master, same.unit[i].master, (size_t)u->count * 4);
        for (int64_t j = 0; j < u->count; j++)
            assert_int_equal(((uint16_t *)same.unit[i].weights)[j], sft_f32_to_bf16(u->master[j]));
        assert_memory_not_equal(same.unit[i].weights, other.unit[i].weights, (size_t)u->count * 2);
        for (int s = 0; s < SFT_SLOTS; s++) {
            if (u->offset[s] < 0) continue;
            SftTensor w = *sft_weight(&u->w, s);
            SftInit init = sft_slot(&m.arch, s).init;
            const float *x = w.data;
            double n = (double)sft_size(w), sum = 0, squares = 0, cubes = 0, fourth = 0,
                   std = init == SFT_INIT_SCALED ? 0.02 / 2 : 0.02; // 2 L = 4
            for (int64_t j = 0; j < sft_size(w); j++) {
                if (init == SFT_INIT_ONE || init == SFT_INIT_ZERO) assert_true(x[j] == (init == SFT_INIT_ONE));
                double z = x[j] / std;
                sum += z, squares += z * z, cubes += z * z * z, fourth += z * z * z * z;
            }
            if (init == SFT_INIT_ONE || init == SFT_INIT_ZERO) continue;
            // Moments of n normal numbers: 0, 1, 0, 3 with standard errors sqrt(1, 2, 15, 96) / sqrt(n); five of them
            // allowed.
            assert_true(fabs(sum) < 5 * sqrt(n) && fabs(squares - n) < 5 * sqrt(2 * n) &&
                        fabs(cubes) < 5 * sqrt(15 * n) && fabs(fourth - 3 * n) < 5 * sqrt(96 * n));
            double lag = 0; // neighbours come from one pair of uniforms, and are independent all the same
            for (int64_t j = 0; j + 1 < sft_size(w); j++) lag += x[j] * x[j + 1] / std / std;
            assert_true(fabs(lag) < 5 * sqrt(n));
        }
    }
    assert_true(m.unit[1].master[0] != m.unit[2].master[0] &&
                m.unit[1].master[m.unit[1].offset[SFT_SLOT_k_w]] != m.unit[1].master[0]);
    close_model(&m), close_model(&same), close_model(&other);
}

static void vocabulary_grows_by_means(void **state) {
    (void)state;
    SftArch a = sft_arch(GOLDEN "llama");
    sft_resize_vocab(&a, 19, false), sft_resize_vocab(&a, 5, true);
    assert_int_equal(a.V, 19);
    EXPECT_ERROR(sft_resize_vocab(&a, 22, false),
                 "the tokenizer has 22 ids and the model's embedding 19 rows: set \"resize_vocab\": true");
    sft_resize_vocab(&a, 22, true);
    assert_int_equal(json_integer_value(json_object_get(a.json, "vocab_size")), 22);
    SftModel m = open_model(a, SFT_BF16, true), old = load_model(GOLDEN "llama", SFT_F32, false);
    sft_load_weights(&m, GOLDEN "llama");
    const struct {
        SftUnit *unit, *old;
        SftSlot slot;
    } grown[] = {{&m.unit[0], &old.unit[0], SFT_SLOT_wte}, {&m.unit[3], &old.unit[3], SFT_SLOT_head_w}};
    for (int g = 0; g < 2; g++)
        for (int64_t c = 0; c < 16; c++) {
            const float *x = grown[g].unit->master + grown[g].unit->offset[grown[g].slot],
                        *y = sft_weight(&grown[g].old->w, grown[g].slot)->data;
            const uint16_t *h = sft_weight(&grown[g].unit->w, grown[g].slot)->data;
            double mean = 0;
            for (int64_t r = 0; r < 19; r++) {
                assert_true(x[r * 16 + c] == y[r * 16 + c]);
                mean += y[r * 16 + c] / 19.0;
            }
            for (int64_t r = 19; r < 22; r++) {
                assert_true(fabs(x[r * 16 + c] - mean) < 1e-6); // the mean is rounded to fp32
                assert_int_equal(h[r * 16 + c], sft_f32_to_bf16(x[r * 16 + c]));
            }
        }
    close_model(&m), close_model(&old);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(configs_as_transformers_reads_them),
                                       cmocka_unit_test(stop_tokens_of_both_files),
                                       cmocka_unit_test(bad_configs_are_refused),
                                       cmocka_unit_test(table_and_units_agree),
                                       cmocka_unit_test(weights_load_and_save),
                                       cmocka_unit_test(weights_convert),
                                       cmocka_unit_test(wrong_files_are_refused),
                                       cmocka_unit_test(names_without_prefix_load),
                                       cmocka_unit_test(wrong_indices_are_refused),
                                       cmocka_unit_test(random_weights),
                                       cmocka_unit_test(vocabulary_grows_by_means)};
    return cmocka_run_group_tests(tests, make_folder, remove_folder) != 0;
}
