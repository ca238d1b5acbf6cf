/* cases.h - every operation of the table at the shapes of training, once for all who measure: bench.c times them on the
   CPU, bench.cu on a GPU, kernel_report.cu counts in emulation what they move.

   A case is a call and its floor: the bytes that must move (operands read once, results written once) and the floating-
   point operations, 0 where no machine takes longer for them than for the bytes. Shapes are those of GPT-2 124M and of
   small Llamas; how many tokens and parameters there are says the includer, and defines before it includes this
       ops, ctx, memory    whose operations, their context, and an arena for operands
       void place(void *to, const void *from, size_t bytes)        copies to where the operations see it
       bool measure(const char *op, const char *what, SftType type, double flops, double bytes)
       bool again(void)    opens a case: is it wanted?; and after each call: once more? */
#ifndef SFT_CASES_H
#define SFT_CASES_H

typedef struct {
    int64_t tokens, matmul_tokens, document; // N of most cases, N of matmuls; N consists of documents of that length
    int64_t vocabulary, rows;                // rows: logits are made for so many tokens at a time
    int64_t parameters;                      // of the optimizer's case
} Shapes;

#define CASE(op, what, type, flops, bytes, ...) \
    for (bool more = measure(#op, what, type, flops, bytes); more; more = again()) CALL(ops->op(&ctx, __VA_ARGS__))
#ifndef CALL
#define CALL(call) call
#endif

static const SftTensor none = {NULL, SFT_F32, {0, 0, 0}};

// Random numbers in [-scale, scale): 65521 of them over and over, a prime number, so that rows differ.
static SftTensor tensor(SftType type, int64_t d0, int64_t d1, int64_t d2, double scale) {
    const int64_t PERIOD = 65521;
    const SftTensor t = sft_take_tensor(&memory, type, d0, d1, d2);
    const int64_t n = d0 * d1 * d2, size = (int64_t)sft_type_size(type);
    char *host = SFT_NEW(char, (n + 1) * size);
    for (int64_t i = 0; i < SFT_MIN(n, PERIOD); i++) {
        const float x = (float)(scale * (2 * sft_uniform(sft_random(1, 0, 0, (uint64_t)i)) - 1));
        sft_from_f32(host + i * size, type, &x, 1);
    }
    for (int64_t i = PERIOD; i < n; i += PERIOD)
        memcpy(host + i * size, host, (size_t)(SFT_MIN(PERIOD, n - i) * size));
    place(t.data, host, (size_t)(n * size));
    free(host);
    return t;
}
static SftTensor vector(SftType type, int64_t n) { return tensor(type, n, 1, 1, 1); }
static SftTensor matrix(SftType type, int64_t rows, int64_t columns) { return tensor(type, rows, columns, 1, 1); }
static int32_t *numbers(const int32_t *host, int64_t n) {
    int32_t *p = (int32_t *)sft_take(&memory, (size_t)n * sizeof *p);
    place(p, host, (size_t)n * sizeof *p);
    return p;
}

typedef struct { int32_t *ids, *pos, *begin, *end; int64_t different; } Tokens; // different: among the ids
static Tokens tokens(int64_t n, int64_t document, int64_t vocabulary) {
    int32_t *host = SFT_NEW(int32_t, 4 * n), *ids = host, *pos = ids + n, *begin = pos + n, *end = begin + n;
    char *seen = SFT_NEW(char, vocabulary);
    Tokens t = {NULL, NULL, NULL, NULL, 0};
    for (int64_t i = 0; i < n; i++) {
        ids[i] = (int32_t)(sft_random(2, 0, 0, (uint64_t)i) % (uint64_t)vocabulary);
        pos[i] = (int32_t)(i % document), begin[i] = (int32_t)(i - pos[i]);
        end[i] = (int32_t)SFT_MIN(begin[i] + document, n);
        t.different += !seen[ids[i]], seen[ids[i]] = 1;
    }
    t.ids = numbers(ids, n), t.pos = numbers(pos, n), t.begin = numbers(begin, n), t.end = numbers(end, n);
    free(host), free(seen);
    return t;
}

// A linear layer of N tokens and what training asks of it; in, out: a GELU before and behind it; r: LoRA's, its side.
typedef struct { const char *name; int64_t I, O; bool bias, in, out, residual; int64_t r; } Layer;
static void matmul_case(SftType type, int64_t N, Layer l) {
    const size_t mark = memory.used;
    const int64_t I = l.I, O = l.O, r = l.r, Op = (O + 15) / 16 * 16; // rows of logits are padded
    const double e = (double)sft_type_size(type), NI = e * (double)(N * I), NO = e * (double)(N * O);
    const double OI = (double)(O * I), flops = N > 1 ? 2 * (double)N * OI : 0, side_flops = 2 * (double)(N * r);
    const SftSide down = {r ? matrix(type, N, r) : none, r ? matrix(type, O, r) : none};
    const SftSide up = {down.x, r ? matrix(type, r, I) : none};
    const SftTensor x = matrix(type, N, I), w = matrix(type, O, I), y = matrix(type, N, Op), dw = matrix(SFT_F32, O, I);
    const SftTensor bias = l.bias ? vector(type, O) : none, dbias = l.bias ? vector(SFT_F32, O) : none;
    const SftTensor before = l.in ? matrix(type, N, I) : none, behind = l.out ? matrix(type, N, O) : none;
    const SftAct in = l.in ? SFT_GELU_TANH : SFT_LINEAR, out = l.out ? SFT_GELU_TANH : SFT_LINEAR;
    CASE(matmul_forward, l.name, type, flops + side_flops * (double)O,
         NI + e * OI + (1 + l.out + l.residual) * NO + e * (double)((N + O) * r), y, behind, x, w, down, bias,
         l.residual ? y : none, 1, out);
    if (N > 1)
        CASE(matmul_backward_x, l.name, type, flops + side_flops * (double)I,
             (1 + l.in) * NI + e * OI + NO + e * (double)((N + I) * r), x, y, w, up, before, 1, in, false);
    if (N > 1 && !r) // LoRA's w does not learn
        CASE(matmul_backward_w, l.name, type, flops, NI + 8 * OI + NO, dw, dbias, y, x);
    sft_give_back(&memory, mark);
}
// GPT-2's layers, one of them with a side; then a narrow one of SmolLM2
static void matmul_cases(SftType type, int64_t N, int64_t V) {
    const Layer layers[] = {{"q 768 x 768", 768, 768, true, false, false, true, 0},
                            {"q 768 x 768, r = 16", 768, 768, true, false, false, true, 16},
                            {"up 3072 x 768", 768, 3072, true, false, true, false, 0},
                            {"down 768 x 3072", 3072, 768, true, true, false, true, 0},
                            {"head V x 768", 768, V, false, false, false, false, 0},
                            {"k 192 x 576", 576, 192, false, false, false, false, 0}};
    for (int l = 0; l < SFT_COUNT(layers); l++) matmul_case(type, N, layers[l]);
}

static void attention_case(SftType type, const char *name, int64_t N, int64_t T, int64_t H, int64_t K, int64_t D) {
    const size_t mark = memory.used;
    const Tokens t = tokens(N, T, 1);
    const double e = (double)sft_type_size(type), rows = (double)(N * D), scale = 1 / sqrt((double)D);
    const double product = rows * (double)(T + 1) * (double)H; // flops of one product of the pairs that see each other
    const double own = e * rows * (double)H, shared = e * rows * (double)K, lses = 4 * (double)(N * H);
    const SftTensor q = tensor(type, N, H, D, 1), y = tensor(type, N, H, D, 1), dq = tensor(type, N, H, D, 1);
    const SftTensor k = tensor(type, N, K, D, 1), v = tensor(type, N, K, D, 1), lse = matrix(SFT_F32, N, H);
    const SftTensor dk = tensor(type, N, K, D, 1), dv = tensor(type, N, K, D, 1);
    CASE(attention_forward, name, type, 2 * product, 2 * own + 2 * shared + lses, y, lse, q, k, v, t.begin,
         (float)scale, 0);
    CASE(attention_backward, name, type, 5 * product, 4 * own + 4 * shared + lses, dq, dk, dv, y, y, lse, q, k, v,
         t.begin, t.end, (float)scale, 0);
    sft_give_back(&memory, mark);
}
// One token after M - 1 others: generation.
static void cache_case(SftType type, int64_t M, int64_t H, int64_t K, int64_t D) {
    const size_t mark = memory.used;
    const int32_t zero = 0, *begin = numbers(&zero, 1);
    const double e = (double)sft_type_size(type);
    const SftTensor q = tensor(type, 1, H, D, 1), y = tensor(type, 1, H, D, 1), lse = matrix(SFT_F32, 1, H);
    const SftTensor k = tensor(type, M, K, D, 1), v = tensor(type, M, K, D, 1);
    CASE(attention_forward, "one token", type, 0, 2 * e * (double)(M * K * D + H * D), y, lse, q, k, v, begin, 0.125f,
         0);
    sft_give_back(&memory, mark);
}
static void attention_cases(SftType type, int64_t N, int64_t T) {
    attention_case(type, "12 heads of 64", N, T, 12, 12, 64);   // GPT-2
    attention_case(type, "9 / 3 heads of 64", N, T, 9, 3, 64);  // SmolLM2
    attention_case(type, "8 / 2 heads of 128", N, T, 8, 2, 128); // as Qwen3 and Llama 3 have them
    attention_case(type, "4 / 1 heads of 256", N, T, 4, 1, 256);
    cache_case(type, 4 * N, 9, 3, 64);
}

static void norm_cases(SftType type, int64_t N, int64_t C) {
    const size_t mark = memory.used;
    const double e = (double)sft_type_size(type), NC = e * (double)(N * C), row = (double)C, n = 4 * (double)N;
    const SftTensor x = matrix(type, N, C), y = matrix(type, N, C), dx = matrix(type, N, C), w = vector(type, C);
    const SftTensor dw = vector(SFT_F32, C), stat = matrix(SFT_F32, N, 2);
    char name[32];
    snprintf(name, sizeof name, "rows of %d", (int)C);
    if (C == 768) { // GPT-2
        CASE(layernorm_forward, name, type, 0, 2 * NC + 2 * n + 2 * e * row, y, stat, x, w, w, 1e-5f);
        CASE(layernorm_backward, name, type, 0, 4 * NC + 2 * n + (e + 16) * row, dx, dw, dw, dx, y, x, w, stat);
    }
    CASE(rmsnorm_forward, name, type, 0, 2 * NC + n + e * row, y, stat, x, w, 1e-5f);
    CASE(rmsnorm_backward, name, type, 0, 4 * NC + n + (e + 8) * row, dx, dw, dx, y, x, w, stat);
    sft_give_back(&memory, mark);
}
static void rope_cases(SftType type, int64_t N, int64_t T, int64_t H, int64_t D) {
    const size_t mark = memory.used;
    const Tokens t = tokens(N, T, 1);
    const SftTensor x = tensor(type, N, H, D, 1), table = matrix(SFT_F32, N, D);
    const double turned = 2 * (double)sft_type_size(type) * (double)(N * H * D), angles = 4 * (double)(N * D);
    SftArch arch;
    memset(&arch, 0, sizeof arch), arch.D = D, arch.rope_theta = 10000;
    if (type == SFT_F32)
        CASE(rope_table, "heads of 64", type, 0, angles + 12 * (double)N, table, &arch, t.pos, t.begin, t.end);
    CASE(rope_forward, "9 heads of 64", type, 0, turned + angles, x, table);
    CASE(rope_backward, "9 heads of 64", type, 0, turned + angles, x, table);
    sft_give_back(&memory, mark);
}
static void embedding_cases(SftType type, int64_t N, int64_t T, int64_t V, int64_t C) {
    const size_t mark = memory.used;
    const Tokens t = tokens(N, T, V);
    const double e = (double)sft_type_size(type), row = (double)C, ids = 8 * (double)N;
    const double all = (double)N * row, words = (double)t.different * row, places = (double)SFT_MIN(N, T) * row;
    const SftTensor x = matrix(type, N, C), wte = matrix(type, V, C), dwte = matrix(SFT_F32, V, C);
    const SftTensor wpe = matrix(type, T, C), dwpe = matrix(SFT_F32, T, C);
    CASE(embedding_forward, "rows of 768", type, 0, e * (all + words + places) + ids, x, wte, wpe, t.ids, t.pos);
    CASE(embedding_backward, "rows of 768", type, 0, e * all + 8 * (words + places) + ids, dwte, dwpe, x, t.ids, t.pos);
    sft_give_back(&memory, mark);
}
static void loss_cases(SftType type, int64_t rows, int64_t V, int64_t C) {
    const size_t mark = memory.used;
    const Tokens t = tokens(rows, rows, V);
    const double e = (double)sft_type_size(type), all = (double)rows * (double)V, some = (double)(rows * C);
    const SftTensor logits = tensor(type, rows, (V + 15) / 16 * 16, 1, 5), loss = vector(SFT_F32, rows);
    const SftTensor x = matrix(type, 2 * rows, C), y = matrix(type, rows, C);
    int32_t *every_second = SFT_NEW(int32_t, rows);
    for (int64_t i = 0; i < rows; i++) every_second[i] = (int32_t)(2 * i);
    const int32_t *index = numbers(every_second, rows);
    free(every_second);
    CASE(cross_entropy, "gradient", type, 0, 2 * e * all + 8 * (double)rows, loss, logits, t.ids, V, 1e-3f);
    CASE(cross_entropy, "no gradient", type, 0, e * all + 8 * (double)rows, loss, logits, t.ids, V, 0);
    CASE(gather_rows, "every second", type, 0, 2 * e * some + 4 * (double)rows, y, x, index);
    CASE(scatter_rows, "every second", type, 0, 3 * e * some + 4 * (double)rows, x, y, index);
    sft_give_back(&memory, mark);
}
static void swiglu_cases(SftType type, int64_t N, int64_t F) {
    const size_t mark = memory.used;
    const double NF = (double)sft_type_size(type) * (double)(N * F);
    const SftTensor y = matrix(type, N, F), gate = matrix(type, N, F), up = matrix(type, N, F);
    CASE(swiglu_forward, "1536 wide", type, 0, 3 * NF, y, gate, up);
    CASE(swiglu_backward, "1536 wide", type, 0, 5 * NF, gate, up, y, gate, up);
    sft_give_back(&memory, mark);
}
static void optimizer_cases(SftType type, int64_t P) {
    const size_t mark = memory.used;
    const double e = (double)sft_type_size(type), n = (double)P;
    const SftTensor low = type == SFT_F32 ? none : vector(type, P), w = vector(SFT_F32, P), m = vector(SFT_F32, P);
    const SftTensor v = tensor(SFT_F32, P, 1, 1, 0), grad = vector(SFT_F32, P);
    const SftAdam adam = {1e-4, 0.9, 0.999, 1e-8, 0.01, 0.1, 0.001};
    const float one = 1;
    float *factor = (float *)sft_take(&memory, sizeof one);
    double *sum = (double *)sft_take(&memory, 2 * sizeof *sum);
    const double nothing[2] = {0, 0};
    place(factor, &one, sizeof one), place(sum, nothing, sizeof nothing);
    CASE(adamw, "", type, 0, (28 + (low.data ? e : 0)) * n, low, w, m, v, grad, factor, adam);
    if (low.data) {
        CASE(convert, "from fp32", type, 0, (4 + e) * n, low, w);
        CASE(convert, "to fp32", type, 0, (4 + e) * n, w, low);
    } else {
        CASE(sums, "", type, 0, 4 * n, sum, grad);
        CASE(clip, "two sectors", type, 0, 64, factor, sum, 1, 1.0, 1.0);
        CASE(zero, "", type, 0, 4 * n, grad);
    }
    sft_give_back(&memory, mark);
}
static void weight_cases(SftType type, int64_t rows, int64_t C) {
    const size_t mark = memory.used;
    const double e = (double)sft_type_size(type), n = (double)(rows * C), blocks = n / SFT_NF4_BLOCK;
    const SftTensor w = matrix(type, rows, C);
    uint8_t *code = (uint8_t *)sft_take(&memory, (size_t)(rows * C)),
            *level = (uint8_t *)sft_take(&memory, (size_t)blocks);
    float *absmax = (float *)vector(SFT_F32, rows + (int64_t)blocks).data, *nested = absmax + rows;
    const SftNf4 four = {code, absmax, NULL, NULL, NULL}, twice = {code, NULL, level, nested + 1, nested};
    const SftInt8 eight = {(int8_t *)code, absmax};
    CASE(nf4_quantize, "", type, 0, (e + 0.5) * n + 4 * blocks, four, w);
    CASE(nf4_dequantize, "", type, 0, (e + 0.5) * n + 4 * blocks, w, four);
    CASE(nf4_quantize, "double", type, 0, (e + 0.5) * n + blocks, twice, w);
    CASE(nf4_dequantize, "double", type, 0, (e + 0.5) * n + blocks, w, twice);
    CASE(int8_quantize, "", type, 0, (e + 1) * n + 4 * (double)rows, eight, w);
    CASE(int8_dequantize, "", type, 0, (e + 1) * n + 4 * (double)rows, w, eight);
    sft_give_back(&memory, mark);
}
// Operations that memory limits
static void memory_cases(SftType type, Shapes s) {
    const Layer head = {"head, one token", 768, s.vocabulary, false, false, false, false, 0};
    norm_cases(type, s.tokens, 768);
    norm_cases(type, s.tokens, 576);     // SmolLM2
    norm_cases(type, 8 * s.tokens, 128); // the heads of q, as Qwen3 norms them
    rope_cases(type, s.tokens, s.document, 9, 64);
    embedding_cases(type, s.tokens, s.document, s.vocabulary, 768);
    swiglu_cases(type, s.tokens, 1536);
    loss_cases(type, s.rows, s.vocabulary, 768);
    weight_cases(type, s.tokens, 768);
    matmul_case(type, 1, head);
    optimizer_cases(type, s.parameters);
}
#endif
