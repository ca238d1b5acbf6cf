/* [2] config under libFuzzer: the first line of the input is the command line, its words separated by spaces;
   a line
   "\nDS\n" on its own divides the rest into the run file and a DeepSpeed file. What sft_config accepts must
   have a manifest that is a run file of the same meaning; everything else must end in sft_die, never in a
   crash. */
#include "fuzz.h"

static void check(const char *manifest, int argc, char **argv) {
    SftConfig c = sft_config(argc, argv);
    if (strcmp(c.command, "help")) {
        json_t *first = sft_config_json(&c);
        if (json_dump_file(first, manifest, JSON_INDENT(1))) abort();
        char *again[] = {"train_gpt2", "export", (char *)manifest, "a", "b"};
        SftConfig d = sft_config(5, again);
        json_t *second = sft_config_json(&d);
        json_object_del(first, "model_name_or_path"), json_object_del(second, "model_name_or_path");
        if (!json_equal(first, second)) abort();
        json_decref(first), json_decref(second);
        sft_config_free(&d);
    }
    sft_config_free(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static char run[64], deepspeed[64], manifest[64];
    if (!*run) {
        snprintf(run, sizeof run, "%s/run.json", fuzz_folder());
        snprintf(deepspeed, sizeof deepspeed, "%s/ds.json", fuzz_folder());
        snprintf(manifest, sizeof manifest, "%s/manifest.json", fuzz_folder());
    }
    char *text = fuzz_text(data, size), *argv[16] = {"train_gpt2"}, *rest = strchr(text, '\n');
    int argc = 1;
    if (rest) *rest++ = 0;
    char *split = rest ? strstr(rest, "\nDS\n") : NULL;
    if (split) *split = 0;
    fuzz_file(run, rest ? rest : "{}");
    fuzz_file(deepspeed, split ? split + 4 : "{}");
    for (char *w = strtok(text, " "); w && argc < 16; w = strtok(NULL, " "))
        argv[argc++] = !strcmp(w, "RUN") ? run : !strcmp(w, "DS") ? deepspeed : w;
    FUZZ_TRY(check(manifest, argc, argv));
    free(text);
    return 0;
}
