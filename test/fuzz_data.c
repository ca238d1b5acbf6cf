/* [3] data under libFuzzer: the input is a file of rows, read as .json or (first byte '#', which is cut off) as .txt,
   with malformed rows refused and skipped. What is accepted must pack and fill batches in which every target is the
   next token of its document. */
#include "fuzz.h"

static SftTokenizer *tok;
static SftTemplate *tpl;

static void check(SftConfig *config, const char *path) {
    json_t *files = json_string(path);
    SftDataset d = sft_dataset(config, tok, tpl, files);
    json_decref(files);
    sft_dataset_pack(&d, config);
    SftBatch b = {0};
    for (int64_t p = 0; p < d.packs; p++) {
        sft_batch_fill(&b, &d, &p, 1);
        for (int64_t i = 0; i < b.n; i++)
            if (b.target[i] != -100 && (i + 1 >= b.end[i] || b.target[i] != b.ids[i + 1])) abort();
        if (b.n > config->max_length) abort();
    }
    sft_batch_free(&b), sft_dataset_free(&d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static SftConfig config;
    static char path[2][64];
    if (!tok) {
        char *argv[] = {"train_gpt2", "data",     "--model_name_or_path", "x", "--train_file", "x", "--max_length",
                        "24",         "--packing"};
        size_t n;
        char *text = sft_read_file("test/golden/template_bytes.json", &n), file[4096];
        sft_write_file(sft_path(file, fuzz_folder(), "tokenizer.json"), text, n);
        text = "{\"eos_token\": \"<|endoftext|>\", \"bos_token\": \"<s>\", \"add_bos_token\": true}";
        sft_write_file(sft_path(file, fuzz_folder(), "tokenizer_config.json"), text, strlen(text));
        config = sft_config(SFT_COUNT(argv), argv);
        tok = sft_tokenizer_load(fuzz_folder());
        tpl = sft_template(tok, "chatml", NULL);
        for (int i = 0; i < 2; i++) snprintf(path[i], sizeof path[i], "%s/rows.%s", fuzz_folder(), i ? "txt" : "json");
#ifndef SFT_NO_OPENMP
        omp_set_num_threads(1);
#endif
    }
    bool text = size && *data == '#';
    FILE *f = fopen(path[text], "w");
    if (!f || fwrite(data + text, 1, size - text, f) != size - text || fclose(f)) abort();
    for (int skip = 0; skip < 2; skip++) {
        free(config.on_bad_row), config.on_bad_row = strdup(skip ? "skip" : "error");
        FUZZ_TRY(check(&config, path[text]));
    }
    return 0;
}
