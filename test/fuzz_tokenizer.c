/* tokenizer.c under libFuzzer: the input is a tokenizer.json, or (first byte '#', which is cut off) a SentencePiece
   tokenizer.model. One that loads must give ids of its own vocabulary for any text, and take back what it gave. */
#include "fuzz.h"

static void check(void) {
    static const char *const texts[] = {
        "", " a  b\r\n\tHello, world! 12345 it's", "h\xc3\xa9llo \xe4\xbd\xa0\xe5\xa5\xbd \xf0\x9f\x98\x80",
        "<s>[INST]<|im_start|></s> \xff\xc3 \xe2\x96\x81x\x01"};
    SftTokenizer *t = sft_tokenizer_load(fuzz_folder());
    SftIds ids = {0};
    for (int i = 0; i < SFT_COUNT(texts); i++)
        for (int special = 0; special < 2; special++) {
            ids.n = 0;
            sft_encode(t, &ids, texts[i], strlen(texts[i]), special);
            for (int64_t k = 0; k < ids.n; k++)
                if (ids.ids[k] < 0 || ids.ids[k] >= sft_vocab_size(t) || !sft_token_text(t, ids.ids[k])) abort();
            size_t bytes;
            char *text = sft_decode(t, ids.ids, ids.n, special, &bytes);
            if (strlen(text) > bytes) abort();
            free(text);
        }
    free(ids.ids), sft_tokenizer_free(t);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    char json[4096], model[4096];
    sft_path(json, fuzz_folder(), "tokenizer.json"), sft_path(model, fuzz_folder(), "tokenizer.model");
    unlink(json), unlink(model);
    bool pieces = size && *data == '#';
    FILE *f = fopen(pieces ? model : json, "w");
    if (!f || fwrite(data + pieces, 1, size - pieces, f) != size - pieces || fclose(f)) abort();
    FUZZ_TRY(check());
    return 0;
}
