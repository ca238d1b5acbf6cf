/* Speed of the tokenizer on one thread: bench_tokenizer FOLDER FILE [SECONDS]

   The file's lines are the texts (a JSON list of alpaca rows works as well: its lines are text too). Prints MB/s of the
   first pass over the file, when no word has been seen yet, and of the fastest pass. */
#define SFT_IMPLEMENTATION
#include "../sft.h"

int main(int argc, char **argv) {
    if (argc < 3) sft_die(SFT_BAD_INPUT, "usage: bench_tokenizer FOLDER FILE [SECONDS]");
    double start = sft_now(), seconds = argc > 3 ? atof(argv[3]) : 2, first = 0, best = 1e30;
    SftTokenizer *t = sft_tokenizer_load(argv[1]);
    printf("load %.2f s\n", sft_now() - start);
    size_t n;
    char *text = sft_read_file(argv[2], &n);
    SftIds ids = {0};
    start = sft_now();
    for (int pass = 0; pass == 0 || sft_now() - start < seconds; pass++) {
        double begin = sft_now();
        ids.n = 0;
        for (char *line = text, *end; line < text + n; line = end + 1) {
            end = (char *)memchr(line, '\n', (size_t)(text + n - line));
            if (!end) end = text + n;
            sft_encode(t, &ids, line, (size_t)(end - line), false);
        }
        double took = sft_now() - begin;
        if (pass == 0) first = took;
        best = SFT_MIN(best, took);
    }
    printf("%s, %s: %.1f MB/s (first pass %.1f), %.2f bytes per token\n", argv[1], argv[2], (double)n / best / 1e6,
           (double)n / first / 1e6, (double)n / (double)ids.n);
    free(text), free(ids.ids);
    sft_tokenizer_free(t);
    return 0;
}
