/* libFuzzer target: any bytes as a safetensors file. What opens must hold what it says: ranges inside the file, in
   order, without holes, and names that are found again. */
#define SFT_IMPLEMENTATION
#include "../sft.h"

static void check(int good, const char *what) {
    if (!good) fprintf(stderr, "%s\n", what), abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    SftSafetensors f = {.map = (const char *)data, .bytes = size};
    char *wrong = sft__safetensors_parse(&f);
    check((wrong != NULL) == (wrong && strlen(wrong) > 0), "an error without words");
    size_t bytes = 0, sum = 0;
    for (int64_t i = 0; !wrong && i < f.n; i++) {
        const SftFileTensor *t = &f.tensor[i];
        check(t->data >= f.map && t->bytes <= size && t->data + t->bytes <= f.map + size, "a tensor outside the file");
        check(sft_safetensors_find(&f, t->name) == t, "a name that is not found");
        for (size_t j = 0; j < t->bytes; j++) sum += (uint8_t)t->data[j];
        bytes += t->bytes;
    }
    if (!wrong) check(size - bytes >= 8 + 2 && sum <= 255 * bytes, "tensors overlap");
    sft_safetensors_close(&f);
    free(wrong);
    return 0;
}
