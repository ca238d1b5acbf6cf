/* tokenizer.c - text in, token ids out, and back; chat templates. See "The tokenizer" in sft.h.

   A model does not read letters but numbers: ids into a fixed vocabulary of pieces of text. Byte-pair encoding (BPE,
   Gage 1994; Sennrich, Haddow, Birch 2016) cuts a word like this: begin with its smallest symbols, then again and
   again join the pair of neighbours that stands highest in a list of merges learnt from a corpus, leftmost first among
   equals, until no neighbours are in the list. What remains are the tokens:

       l o w e r    merges, best first: (e r) (l o) (lo w)    ->    l o w er -> lo w er -> low er

   What the smallest symbols are divides the models in two families. Byte-level (GPT-2, Llama 3, Qwen): the 256 bytes,
   which the vocabulary spells as 256 printable characters ("Ġ" is a space); a regular expression first cuts the text
   into words, and merges never cross them. SentencePiece-like (Llama 2, Mistral): characters; every space becomes "▁",
   the whole text is one word, and a character outside the vocabulary falls back on tokens <0x00>..<0xFF> for its bytes.

   Everything around the merges is a pipeline, and tokenizer.json lists its parts; each is a step here:

       text -> added tokens that are matched in the text as it is     <|im_start|>
            -> normalizer: text -> text                               NFC, Prepend, Replace, Strip
            -> added tokens that are matched in normalized text
            -> pre_tokenizer: a piece -> smaller pieces               Split, ByteLevel, Digits, Metaspace, ...
            -> model: a word -> ids                                   the merges
            -> post_processor: ids -> ids                             BOS before, EOS behind
       ids  -> decoder: tokens -> text                                ByteLevel, ByteFallback, Replace, Strip, ...

   The result is, id for id, that of Hugging Face's `tokenizers` on the same file. Text that is not UTF-8 is read as
   Python's bytes.decode("utf-8", "replace") and Rust's from_utf8_lossy read it: each longest sequence of bytes that
   begins a character without ending it becomes U+FFFD. Where the two differ on purpose: an added token keeps the id
   that the file says (the reference silently numbers it anew), and files that contradict themselves are refused.

   Speed. Words repeat, so each thread remembers the ids of recent words (Sft__Entry); the others are cut where no merge
   can reach across (sft__join) and merged without touching the allocator (sft__merge). Guarded by
   test/test_tokenizer.c. The usual pitfall: regular expressions of two engines that look alike and are not (sft__regex
   translates from Oniguruma, which the files are written for). */
#include "sft.h"
#include <ctype.h>
#include <jansson.h>
#include <math.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>
#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#ifndef SFT_NO_OPENMP
#include <omp.h>
#endif

/* ================================================================================================================
   Bytes, characters, and a table of words
   ================================================================================================================ */
typedef struct { char *p; size_t n, cap; } Sft__Bytes; // growing

static void sft__add(Sft__Bytes *b, const char *text, size_t n) {
    if (b->n + n > b->cap) b->p = sft_realloc(b->p, b->cap = 2 * (b->n + n) + 64);
    if (n) memcpy(b->p + b->n, text, n);
    b->n += n;
}

static void sft__adds(Sft__Bytes *b, const char *text) { sft__add(b, text, strlen(text)); }

static inline size_t sft__length(char first) { // bytes of the character that begins so, in valid UTF-8
    uint8_t c = (uint8_t)first;
    return c < 0x80 ? 1 : c < 0xe0 ? 2 : c < 0xf0 ? 3 : 4;
}

static inline bool sft__inside(char c) { return ((uint8_t)c & 0xc0) == 0x80; } // not the first byte of a character

static inline uint32_t sft__char(const char *text, size_t *at) { // the character at *at of valid UTF-8; moves on
    const uint8_t *p = (const uint8_t *)text + *at;
    size_t n = sft__length(text[*at]);
    *at += n;
    if (n == 1) return p[0];
    if (n == 2) return (p[0] & 31u) << 6 | (p[1] & 63u);
    if (n == 3) return (p[0] & 15u) << 12 | (p[1] & 63u) << 6 | (p[2] & 63u);
    return (p[0] & 7u) << 18 | (p[1] & 63u) << 12 | (p[2] & 63u) << 6 | (p[3] & 63u);
}

/* Bytes of the valid character at p[0..n), or minus the number that one U+FFFD stands for: the lead byte and those
   behind it that could still have led to a character (Unicode 15, section 3.9, table 3-7). */
static int sft__valid(const char *text, size_t n) {
    const uint8_t *p = (const uint8_t *)text;
    uint8_t c = p[0], low = c == 0xe0 ? 0xa0 : c == 0xf0 ? 0x90 : 0x80; // below: overlong
    uint8_t high = c == 0xed ? 0x9f : c == 0xf4 ? 0x8f : 0xbf;          // above: surrogates, beyond U+10FFFF
    int need = c >= 0xc2 && c <= 0xdf ? 1 : (c & 0xf0) == 0xe0 ? 2 : c >= 0xf0 && c <= 0xf4 ? 3 : 0;
    if (c < 0x80) return 1;
    for (int i = 1; i <= need; i++, low = 0x80, high = 0xbf)
        if ((size_t)i >= n || p[i] < low || p[i] > high) return -i;
    return need ? need + 1 : -1;
}

// text itself if it is valid UTF-8, else a copy in `out` with U+FFFD for what is not.
static const char *sft__utf8(Sft__Bytes *out, const char *text, size_t *n) {
    size_t kept = 0, i = 0;
    out->n = 0;
    while (i < *n) {
        uint64_t eight;
        if (i + 8 <= *n && (memcpy(&eight, text + i, 8), !(eight & 0x8080808080808080u))) {
            i += 8;
            continue;
        }
        int k = sft__valid(text + i, *n - i);
        i += (size_t)abs(k);
        if (k > 0) continue;
        sft__add(out, text + kept, i - (size_t)-k - kept);
        sft__add(out, "\xef\xbf\xbd", 3);
        kept = i;
    }
    if (!kept) return text;
    sft__add(out, text + kept, *n - kept);
    *n = out->n;
    return out->p;
}

/* How byte-level vocabularies spell a byte: printable Latin-1 as itself, the other 68 in order as U+0100, U+0101, ...
   (Radford et al. 2019, bytes_to_unicode). */
static uint32_t sft__byte_char(int byte) {
    if ((byte >= '!' && byte <= '~') || (byte >= 0xa1 && byte != 0xad)) return (uint32_t)byte;
    return 256u + (uint32_t)(byte <= ' ' ? byte : byte == 0xad ? 67 : byte - 127 + 33);
}

static int sft__char_byte(uint32_t c) { // the byte that the character spells, -1 if none
    if (c < 256) return sft__byte_char((int)c) == c ? (int)c : -1;
    return c <= 288 ? (int)c - 256 : c < 323 ? (int)c - 289 + 127 : c == 323 ? 0xad : -1;
}

static void sft__add_char(Sft__Bytes *b, uint32_t c) {
    utf8proc_uint8_t utf8[4];
    sft__add(b, (char *)utf8, (size_t)utf8proc_encode_char((utf8proc_int32_t)c, utf8));
}

// Adds the bytes that the characters of text[0..n) spell; false, and nothing, where one of them spells none.
static bool sft__add_unspelled(Sft__Bytes *b, const char *text, size_t n) {
    size_t before = b->n;
    for (size_t i = 0; i < n;) {
        int byte = sft__char_byte(sft__char(text, &i));
        if (byte < 0) b->n = before;
        if (byte < 0) return false;
        sft__add(b, (char[1]){(char)byte}, 1);
    }
    return true;
}

static inline uint64_t sft__hash(const char *p, size_t n) {
    uint64_t h = n * 0x9e3779b97f4a7c15u, v = 0;
    for (; n >= 8; p += 8, n -= 8) {
        memcpy(&v, p, 8);
        h = (h ^ v) * 0xbf58476d1ce4e5b9u;
        h ^= h >> 29;
    }
    for (v = 0; n; n--) v = v << 8 | (uint8_t)*p++;
    h = (h ^ v) * 0x94d049bb133111ebu;
    return h ^ h >> 32;
}

// Strings by id and ids by string. Ids may have holes. Open addressing, at most half full.
typedef struct {
    Sft__Bytes text;
    uint32_t *at, *length; // of an id: where its string is; length SFT__HOLE: the id has none
    int32_t ids, *slot;    // highest id + 1; hash -> id, -1: free
    uint64_t mask;
} Sft__Words;
#define SFT__HOLE UINT32_MAX
#define SFT__MAX_ID ((1 << 24) - 1) // no real vocabulary comes near; keeps a false id from taking all memory

static void sft__words_open(Sft__Words *w, int32_t ids, size_t strings) {
    w->ids = ids;
    w->at = SFT_NEW(uint32_t, ids);
    w->length = memset(SFT_NEW(uint32_t, ids), 0xff, (size_t)ids * 4);
    for (w->mask = 15; w->mask < 2 * strings; w->mask = 2 * w->mask + 1) {}
    w->slot = memset(SFT_NEW(int32_t, w->mask + 1), 0xff, (w->mask + 1) * 4);
}

static int32_t sft__words_find(const Sft__Words *w, const char *text, size_t n) {
    for (uint64_t i = sft__hash(text, n) & w->mask; w->slot[i] >= 0; i = (i + 1) & w->mask) {
        int32_t id = w->slot[i];
        if (w->length[id] == n && !memcmp(w->text.p + w->at[id], text, n)) return id;
    }
    return -1;
}

static void sft__words_put(Sft__Words *w, const char *text, size_t n, int32_t id) {
    uint64_t i = sft__hash(text, n) & w->mask;
    w->at[id] = (uint32_t)w->text.n, w->length[id] = (uint32_t)n;
    sft__add(&w->text, text, n);
    sft__add(&w->text, "", 1);
    while (w->slot[i] >= 0) i = (i + 1) & w->mask;
    w->slot[i] = id;
}

/* ================================================================================================================
   The tokenizer, and what one thread needs to encode
   ================================================================================================================ */
/* One step of a pipeline. The kinds that turn a text into a text serve normalizer, pre-tokenizer and decoder alike, and
   every component of a file is one or a few of these steps: Metaspace is REPLACE, PREPEND and SPLIT. */
typedef enum {
    // text -> text
    SFT__UNICODE, // a normal form: mode = utf8proc's options
    SFT__PREPEND, // `text` before it; mode: when (SFT__FIRST ...)
    SFT__REPLACE, // `text` for every match of regex, or where that is NULL, of the byte `from`; mode SFT__FIRST: in the
                  // first token nothing instead of `text`
    SFT__BYTES,   // every byte as its character
    SFT__UNBYTES, // every character as its byte; as it is, where a character is none
    // pre-tokenizer: a text -> pieces
    SFT__SPLIT, // at the matches of regex; mode: what becomes of these (SFT__ISOLATED ...)
    // decoder: tokens -> tokens
    SFT__UNHEX, // <0x41> is a byte
    SFT__FUSE,  // all become one, with `text` between them
} Sft__Kind;
enum { SFT__ISOLATED, SFT__REMOVED, SFT__CONTIGUOUS, SFT__WITH_PREVIOUS, SFT__WITH_NEXT };
enum { SFT__NFC = UTF8PROC_STABLE | UTF8PROC_COMPOSE }; // one of utf8proc's options
enum { SFT__NEVER, SFT__FIRST, SFT__ALWAYS, SFT__AGAIN }; // AGAIN: even where it stands already
// Where a text stands: it begins everything, comes behind an added token or a cut, or goes on from other text.
typedef enum { SFT__BEGINS, SFT__BEHIND, SFT__GOES_ON } Sft__Place;
typedef struct {
    Sft__Kind kind;
    pcre2_code *regex;
    char *text, from;
    size_t n; // bytes of text
    int mode;
    bool invert; // SPLIT: what matches and what does not change places
} Sft__Step;
enum { SFT__STEPS = 24 };
typedef struct { Sft__Step step[SFT__STEPS]; int n; } Sft__Pipeline;

typedef struct { uint64_t pair; uint32_t rank; int32_t id; } Sft__Merge; // pair: left id << 32 | right id
#define SFT__NONE UINT64_MAX

// Added tokens as a trie. A node is the text of its parent and one byte more; node 0 is the empty text.
typedef struct { int32_t child, sibling, token; uint8_t byte; } Sft__Node; // child, sibling: 0: none; token: id or -1
typedef struct { Sft__Node *node; int32_t n; bool begins[256]; } Sft__Trie; // begins: bytes that a token begins with
enum { SFT__SPECIAL = 1, SFT__LSTRIP = 2, SFT__RSTRIP = 4, SFT__WORD = 8, SFT__NORMALIZED = 16 }; // SftTokenizer.flags

enum { SFT__KEY = 30, SFT__CACHED = 8, SFT__CACHE = 1 << 14, SFT__SHORT = 64, SFT__SCRATCHES = 64 };
typedef struct { uint8_t length, n; char key[SFT__KEY]; int32_t ids[SFT__CACHED]; } Sft__Entry; // one cache line
typedef struct { int32_t id, next, previous, made; } Sft__Symbol; // made: what it becomes with its right neighbour
typedef struct {
    atomic_flag busy;
    Sft__Bytes utf8, normal[2], step[SFT__STEPS];
    Sft__Entry *cache; // direct mapped: word -> ids
    pcre2_match_data *match;
    pcre2_match_context *context;
    pcre2_jit_stack *stack;
    Sft__Symbol *symbol; // of the word that is merged: [room]
    uint32_t *rank;      // of the merge of a symbol and the next, UINT32_MAX: none: [room]
    uint64_t *heap;      // rank << 32 | position: [2 * room]
    size_t room, entries; // entries: of the heap
} Sft__Scratch;

struct SftTokenizer {
    char *file;            // for messages
    Sft__Words words, raw; // as the file spells them; byte-level: the bytes they stand for
    Sft__Merge *merge;     // open addressing
    uint64_t merge_mask, *filter; // filter: a bit for every pair's hash; most pairs are none: a small table says so
    int filter_shift;
    bool byte_level, byte_fallback, fuse_unk, ignore_merges;
    bool all_known;            // no unknown token can arise: every byte has an id
    int32_t unk, byte_id[256]; // byte-level: a byte's id; else that of <0xHH>; -1: none
    uint8_t *joined;           // see sft__join; NULL: words are never cut
    Sft__Pipeline normalizer, pre_tokenizer, decoder;
    Sft__Trie added[2];    // looked for in the text as it is, and in normalized text
    uint8_t *flags;        // by id: of added tokens (SFT__SPECIAL ...)
    pcre2_code *word_char; // for single_word
    SftIds prefix, suffix; // what the post-processor adds
    int32_t bos, eos;
    char *chat_template;
    Sft__Scratch *scratch; // [SFT__SCRATCHES]; the only part that changes after loading
};

SFT_NORETURN static void sft__bad(const SftTokenizer *t, const char *format, ...) SFT_PRINTF(2, 3);
static void sft__bad(const SftTokenizer *t, const char *format, ...) {
    char line[1500];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    sft_die(SFT_BAD_INPUT, "%s: %s", t->file, line);
}

// A scratch area that no other thread holds. The cache lives in it, so a thread prefers its own.
static Sft__Scratch *sft__borrow(const SftTokenizer *t) {
    unsigned i = 0;
#ifndef SFT_NO_OPENMP
    i = (unsigned)omp_get_thread_num();
#endif
    while (atomic_flag_test_and_set_explicit(&t->scratch[i % SFT__SCRATCHES].busy, memory_order_acquire)) i++;
    Sft__Scratch *s = &t->scratch[i % SFT__SCRATCHES];
    if (!s->cache) {
        s->cache = SFT_NEW(Sft__Entry, SFT__CACHE);
        s->match = pcre2_match_data_create(1, NULL);
        s->context = pcre2_match_context_create(NULL);
        s->stack = pcre2_jit_stack_create(1 << 15, 1 << 22, NULL);
        if (!s->match || !s->context || !s->stack) sft_die(SFT_BROKEN, "out of memory for regular expressions");
        pcre2_set_match_limit(s->context, 100000000);
        pcre2_jit_stack_assign(s->context, NULL, s->stack);
    }
    return s;
}

static void sft__give(Sft__Scratch *s) { atomic_flag_clear_explicit(&s->busy, memory_order_release); }

/* ================================================================================================================
   Regular expressions
   ================================================================================================================
   tokenizer.json's are written for Oniguruma with Ruby's syntax; PCRE2 reads most of it alike. What it would read
   differently is rewritten here or refused, never passed on: \s (PCRE2 counts U+180E, Unicode does not), \w, \p{Han}
   (PCRE2 means the script's extensions), {,n}, \uHHHH; classes in classes and their intersections. */
#define SFT__WHITE "\\t-\\r\\x20\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}\\x{3000}"
#define SFT__WORDS "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define SFT__GPT2 "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

static pcre2_code *sft__compile(const SftTokenizer *t, const char *regex, size_t n) {
    int error, options = PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C; // ^ and $ are Ruby's
    PCRE2_SIZE at;
    char why[200];
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    if (!context) sft_die(SFT_BROKEN, "out of memory for a regular expression");
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    pcre2_code *code = pcre2_compile((PCRE2_SPTR)regex, n, (uint32_t)options, &error, &at, context);
    pcre2_compile_context_free(context);
    if (!code) {
        pcre2_get_error_message(error, (PCRE2_UCHAR *)why, sizeof why);
        sft__bad(t, "cannot use the regular expression \"%.300s\": %s", regex, why);
    }
    pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); // where there is no JIT, matching works without it
    return code;
}

// Rewrites the escape at regex[at..]; class: it stands between [ and ]. Returns its length.
static size_t sft__escape(const SftTokenizer *t, Sft__Bytes *out, const char *regex, size_t n, size_t at, bool class) {
    static const struct { char c; const char *alone, *in_class; } sets[] = {
        {'s', "[" SFT__WHITE "]", SFT__WHITE}, {'S', "[^" SFT__WHITE "]", "\\P{White_Space}"},
        {'w', "[" SFT__WORDS "]", SFT__WORDS}, {'W', "[^" SFT__WORDS "]", NULL}};
    char c = at + 1 < n ? regex[at + 1] : 0;
    for (int i = 0; i < SFT_COUNT(sets); i++) {
        const char *set = class ? sets[i].in_class : sets[i].alone;
        if (c != sets[i].c || !set) continue;
        sft__adds(out, set);
        return 2;
    }
    if (c == 'u' && at + 6 <= n) {
        sft__adds(out, "\\x{"), sft__add(out, regex + at + 2, 4), sft__adds(out, "}");
        return 6;
    }
    if (c == 'p' || c == 'P') { // names of one or two letters are general categories, longer ones scripts
        const char *end = at + 2 < n && regex[at + 2] == '{' ? memchr(regex + at, '}', n - at) : NULL;
        if (!end) sft__bad(t, "the regular expression \"%.300s\" has \\%c without {name}", regex, c);
        size_t name = at + 3 + (regex[at + 3] == '^'), length = (size_t)(end - regex) + 1 - at;
        sft__add(out, regex + at, name - at);
        if (end - regex - (ptrdiff_t)name > 2) sft__add(out, "sc:", 3);
        sft__add(out, regex + name, at + length - name);
        return length;
    }
    if (!c || strchr("bBhHQEGKNXRyYCMuUcW", c))
        sft__bad(t, "the regular expression \"%.300s\" has \\%c, which is not supported", regex, c ? c : ' ');
    sft__add(out, regex + at, 2);
    return 2;
}

static pcre2_code *sft__regex(const SftTokenizer *t, const char *regex, size_t n) {
    Sft__Bytes out = {0};
    const char *refused = NULL;
    bool class = false;
    for (size_t i = 0; i < n && !refused;) {
        char c = regex[i], d = i + 1 < n ? regex[i + 1] : 0;
        if (c == '\\') {
            i += sft__escape(t, &out, regex, n, i, class);
            continue;
        }
        if (class && c == '[') refused = "a class inside a class";
        if (class && c == '&' && d == '&') refused = "&&";
        if (!class && c == '(' && d == '*') refused = "(*";
        if (!class && c == '}' && d == '+') refused = "}+"; // possessive for one engine, a repetition for the other
        bool empty = c == '[' && (d == ']' || (d == '^' && i + 2 < n && regex[i + 2] == ']'));
        if (!class && empty) refused = "an empty class";
        class = class ? c != ']' : c == '[';
        sft__add(&out, regex + i++, 1);
        if (!class && c == '{' && d == ',') sft__add(&out, "0", 1);
    }
    if (refused) sft__bad(t, "the regular expression \"%.300s\" has %s, which is not supported", regex, refused);
    sft__add(&out, "", 1);
    pcre2_code *code = sft__compile(t, out.p, out.n - 1);
    free(out.p);
    return code;
}

// Matches this very text between `before` and `behind`, two parts of a regular expression; an empty text nowhere.
static pcre2_code *sft__literal(const SftTokenizer *t, const char *before, const char *text, const char *behind) {
    Sft__Bytes out = {0};
    char hex[16];
    sft__adds(&out, before);
    if (!*text) sft__adds(&out, "(?!)");
    for (size_t i = 0; text[i];) sft__add(&out, hex, (size_t)snprintf(hex, sizeof hex, "\\x{%x}", sft__char(text, &i)));
    sft__add(&out, behind, strlen(behind) + 1);
    pcre2_code *code = sft__compile(t, out.p, out.n - 1);
    free(out.p);
    return code;
}

// Matches one after the other. As in the reference, an empty match right behind the last match does not count.
typedef struct { const pcre2_code *regex; const char *text; size_t n, at, last, from, to; } Sft__Finder;
#define SFT__FINDER(regex, text, n) {regex, text, n, 0, SIZE_MAX, 0, 0}

static bool sft__find(Sft__Finder *f, Sft__Scratch *s) {
    const PCRE2_SIZE *range = pcre2_get_ovector_pointer(s->match);
    PCRE2_SPTR text = (PCRE2_SPTR)f->text;
    while (f->at <= f->n) {
        int rc = pcre2_jit_match(f->regex, text, f->n, f->at, 0, s->match, s->context);
        if (rc == PCRE2_ERROR_JIT_BADOPTION || rc == PCRE2_ERROR_JIT_STACKLIMIT)
            rc = pcre2_match(f->regex, text, f->n, f->at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s->match, s->context);
        if (rc == PCRE2_ERROR_NOMATCH) return false;
        if (rc < 0 || range[0] < f->at || range[1] < range[0]) {
            char why[200] = "it moves backwards";
            if (rc < 0) pcre2_get_error_message(rc, (PCRE2_UCHAR *)why, sizeof why);
            sft_die(SFT_BAD_INPUT, "a regular expression of the tokenizer fails on the text \"%.*s\": %s",
                    (int)SFT_MIN(f->n - f->at, 60), f->text + f->at, why);
        }
        f->from = range[0], f->to = range[1];
        bool again = f->from == f->to && f->last == f->to;
        f->at = again ? f->at + (f->at < f->n ? sft__length(f->text[f->at]) : 1) : f->to;
        f->last = f->to;
        if (!again) return true;
    }
    return false;
}

/* ================================================================================================================
   The model: a word -> ids
   ================================================================================================================ */
static inline const Sft__Merge *sft__pair(const SftTokenizer *t, int32_t a, int32_t b) {
    uint64_t pair = (uint64_t)(uint32_t)a << 32 | (uint32_t)b, h = pair * 0x9e3779b97f4a7c15u;
    uint64_t bit = h >> t->filter_shift;
    if (!(t->filter[bit / 64] >> bit % 64 & 1)) return NULL;
    for (uint64_t i = h >> 20;; i++) {
        const Sft__Merge *m = &t->merge[i & t->merge_mask];
        if (m->pair == pair) return m;
        if (m->pair == SFT__NONE) return NULL;
    }
}

/* The symbols that a word begins with; at most n of them. As in the reference, an unknown character without a token
   for each of its bytes becomes unk (several in a row one unk if fuse_unk), or nothing where there is no unk; a pending
   unk is written when the next known character or the end comes. */
static int32_t sft__symbols(const SftTokenizer *t, Sft__Symbol *symbol, const char *word, size_t n) {
    int32_t count = 0;
    bool pending = false;
    for (size_t i = 0, from; (from = i) < n;) {
        i += t->byte_level ? 1 : sft__length(word[i]);
        const char *s = word + from;
        int32_t id = t->byte_level ? t->byte_id[(uint8_t)*s] : sft__words_find(&t->words, s, i - from);
        if (id >= 0) {
            if (pending) symbol[count++].id = t->unk;
            pending = false;
            symbol[count++].id = id;
            continue;
        }
        bool bytes = t->byte_fallback;
        for (size_t k = from; k < i && bytes; k++) bytes = t->byte_id[(uint8_t)word[k]] >= 0;
        if (bytes) {
            for (size_t k = from; k < i; k++) symbol[count++].id = t->byte_id[(uint8_t)word[k]];
        } else if (t->unk >= 0) {
            if (pending && !t->fuse_unk) symbol[count++].id = t->unk;
            pending = true;
        }
    }
    if (pending) symbol[count++].id = t->unk;
    return count;
}

/* The pair to merge next is that of the lowest rank, leftmost among equals. In a short word it is found by looking
   through all ranks (one SIMD minimum), in a long one by a heap, whose entries count only while they hold the rank of
   the pair that begins there. A merge takes one entry out and puts at most two in, so 2 n are enough. */
static inline int32_t sft__best(Sft__Scratch *s, int32_t n) { // where that pair begins, -1 if there is none
    if (n <= SFT__SHORT) {
        uint32_t best = UINT32_MAX;
        int32_t at = 0;
        for (int32_t i = 0; i < n; i++) best = s->rank[i] < best ? s->rank[i] : best;
        if (best == UINT32_MAX) return -1;
        while (s->rank[at] != best) at++;
        return at;
    }
    while (s->entries) {
        uint64_t top = s->heap[0], x = s->heap[--s->entries];
        size_t i = 0, child;
        for (; (child = 2 * i + 1) < s->entries; i = child) {
            if (child + 1 < s->entries && s->heap[child + 1] < s->heap[child]) child++;
            if (s->heap[child] >= x) break;
            s->heap[i] = s->heap[child];
        }
        s->heap[i] = x;
        if (s->rank[(uint32_t)top] == top >> 32) return (int32_t)(uint32_t)top;
    }
    return -1;
}

static inline void sft__rank(const SftTokenizer *t, Sft__Scratch *s, int32_t i, int32_t n) { // ... symbol i's pair anew
    int32_t next = s->symbol[i].next;
    const Sft__Merge *m = next < n ? sft__pair(t, s->symbol[i].id, s->symbol[next].id) : NULL;
    s->rank[i] = m ? m->rank : UINT32_MAX;
    if (!m) return;
    s->symbol[i].made = m->id;
    if (n <= SFT__SHORT) return;
    uint64_t x = (uint64_t)m->rank << 32 | (uint32_t)i;
    size_t k = s->entries++;
    for (; k && s->heap[(k - 1) / 2] > x; k = (k - 1) / 2) s->heap[k] = s->heap[(k - 1) / 2];
    s->heap[k] = x;
}

typedef struct { const SftTokenizer *t; Sft__Scratch *s; SftIds *out; } Sft__Encoder;

static void sft__merge(Sft__Encoder *e, const char *word, size_t length) {
    const SftTokenizer *t = e->t;
    Sft__Scratch *s = e->s;
    if (length > INT32_MAX / 4) sft_die(SFT_BAD_INPUT, "a word of %zu bytes is too long; cut the text", length);
    if (length > s->room) {
        s->room = 2 * length + SFT__SHORT;
        s->symbol = sft_realloc(s->symbol, s->room * sizeof *s->symbol);
        s->rank = sft_realloc(s->rank, s->room * sizeof *s->rank);
        s->heap = sft_realloc(s->heap, s->room * 2 * sizeof *s->heap);
    }
    Sft__Symbol *symbol = s->symbol;
    int32_t n = sft__symbols(t, symbol, word, length), i;
    s->entries = 0;
    for (i = 0; i < n; i++) {
        symbol[i].next = i + 1, symbol[i].previous = i - 1;
        sft__rank(t, s, i, n);
    }
    while ((i = sft__best(s, n)) >= 0) {
        int32_t gone = symbol[i].next, right = symbol[gone].next, left = symbol[i].previous;
        symbol[i].id = symbol[i].made, symbol[i].next = right;
        symbol[gone].id = -1, s->rank[gone] = UINT32_MAX;
        if (right < n) symbol[right].previous = i;
        sft__rank(t, s, i, n);
        if (left >= 0) sft__rank(t, s, left, n);
    }
    sft_ids_room(e->out, n);
    for (i = 0; i < n; i = symbol[i].next) e->out->ids[e->out->n++] = symbol[i].id;
}

/* Where a word may be cut. A merge of tokens A and B joins the last character of A to the first of B. So where two
   neighbouring characters x y are not (last of A, first of B) in any merge, no merge can ever reach across, and both
   sides may be merged on their own. This makes words of the endless text of SentencePiece-like models (tokens hold "▁"
   only at their beginning, so "e▁" is never joined), and short stretches that come again and again of the long runs of
   Chinese that byte-level models see. A byte-level token may hold a part of a character: A the end of x, B the
   beginning of y. Such parts are entered by one byte, the last of A or the first of B, behind SFT__PART.
   t->joined is a bit set over a hash of (x, y): a false alarm costs a cut, nothing else. All this holds only if
   whatever can be merged is spelled as the text it stands for, which loading checks. */
enum { SFT__PART = 0x110000, SFT__JOINED = 1 << 20 };
static inline uint32_t sft__join(uint32_t x, uint32_t y) {
    if ((x | y) < 128) return x << 7 | y; // ASCII close together
    return (x * 0x9e3779b1u ^ y * 0x85ebca77u) * 0xc2b2ae3du >> 12;
}

static inline bool sft__joined(const SftTokenizer *t, uint32_t x, uint32_t y) {
    uint32_t bit = sft__join(x, y);
    return t->joined[bit / 8] >> bit % 8 & 1;
}

static inline bool sft__may_cut(const SftTokenizer *t, uint32_t x, uint8_t last, uint32_t y, uint8_t first) {
    if (sft__joined(t, x, y)) return false;
    if (!t->byte_level || (x | y) < 128) return true;
    if (y >= 128 && sft__joined(t, x, SFT__PART + first)) return false;
    if (x < 128) return true;
    return !sft__joined(t, SFT__PART + last, y) && !(y >= 128 && sft__joined(t, SFT__PART + last, SFT__PART + first));
}

static void sft__word(Sft__Encoder *e, const char *word, size_t n, bool stretch);

// Cuts a word where that is allowed and encodes the stretches. Beside an unknown character there is no cut: a run of
// those may become one token.
static void sft__stretches(Sft__Encoder *e, const char *word, size_t n) {
    const SftTokenizer *t = e->t;
    size_t from = 0, i = 0, at;
    bool known = true, known_x = true, known_y = true;
    uint32_t x = sft__char(word, &i), y;
    if (!t->all_known) known_x = sft__words_find(&t->words, word, i) >= 0;
    for (; from < n; x = y, known_x = known_y) {
        at = i, y = 0;
        if (i < n) {
            y = sft__char(word, &i);
            if (!t->all_known) known_y = sft__words_find(&t->words, word + at, i - at) >= 0;
            known = known_x && known_y;
            if (!known || !sft__may_cut(t, x, (uint8_t)word[at - 1], y, (uint8_t)word[at])) continue;
        }
        if (at - from == n) sft__merge(e, word, n);
        else sft__word(e, word + from, at - from, true);
        from = at;
    }
}

// Encodes a word, or a stretch of one; what fits an entry of the cache is remembered. Only a whole word may be a token
// that merges do not make (ignore_merges), so there the two are remembered apart.
static void sft__word(Sft__Encoder *e, const char *word, size_t n, bool stretch) {
    const SftTokenizer *t = e->t;
    SftIds *out = e->out;
    Sft__Entry *entry = NULL;
    uint8_t length = (uint8_t)(n | (stretch && t->ignore_merges ? 64 : 0));
    if (n <= SFT__KEY) {
        entry = &e->s->cache[sft__hash(word, n) % SFT__CACHE];
        if (entry->length == length && !memcmp(entry->key, word, n)) {
            sft_ids_room(out, SFT__CACHED);
            memcpy(out->ids + out->n, entry->ids, sizeof entry->ids);
            out->n += entry->n;
            return;
        }
    }
    int64_t before = out->n;
    int32_t whole = -1;
    if (t->ignore_merges && !stretch) whole = sft__words_find(t->byte_level ? &t->raw : &t->words, word, n);
    if (whole >= 0) sft_ids_add(out, whole);
    else if (stretch || !t->joined) sft__merge(e, word, n);
    else sft__stretches(e, word, n);
    if (!entry || out->n - before > SFT__CACHED) return;
    entry->length = length, entry->n = (uint8_t)(out->n - before);
    memcpy(entry->key, word, n);
    if (entry->n) memcpy(entry->ids, out->ids + before, entry->n * sizeof *entry->ids);
}

/* ================================================================================================================
   Normalizer and pre-tokenizer
   ================================================================================================================ */
static bool sft__white(uint32_t c) { // Unicode's White_Space
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
           c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

// Bytes of white space at the beginning of text[0..n), and at its end.
static size_t sft__white_left(const char *text, size_t n) {
    size_t i = 0, at = 0;
    while (i < n && sft__white(sft__char(text, &i))) at = i;
    return at;
}
static size_t sft__white_right(const char *text, size_t n) {
    size_t at = n, begin, i;
    for (; at; at = begin) {
        for (begin = at - 1; sft__inside(text[begin]);) begin--;
        if (i = begin, !sft__white(sft__char(text, &i))) break;
    }
    return n - at;
}

static void sft__replace(const Sft__Step *step, Sft__Bytes *out, Sft__Scratch *s, const char *text, size_t n,
                         Sft__Place place) {
    size_t done = 0, m = place == SFT__BEGINS && step->mode == SFT__FIRST ? 0 : step->n;
    if (!step->regex) {
        for (const char *p; done < n && (p = memchr(text + done, step->from, n - done));) {
            sft__add(out, text + done, (size_t)(p - text) - done);
            sft__add(out, step->text, m);
            done = (size_t)(p - text) + 1;
        }
    } else {
        for (Sft__Finder f = SFT__FINDER(step->regex, text, n); sft__find(&f, s); done = f.to) {
            sft__add(out, text + done, f.from - done);
            sft__add(out, step->text, m);
        }
    }
    sft__add(out, text + done, n - done);
}

// Adds to `out` what a step makes of text[0..n), or of a token.
static void sft__rewrite(const Sft__Step *step, Sft__Bytes *out, Sft__Scratch *s, const char *text, size_t n,
                         Sft__Place place) {
    if (step->kind == SFT__UNICODE) {
        utf8proc_uint8_t *result = NULL;
        const utf8proc_uint8_t *from = (const utf8proc_uint8_t *)text;
        utf8proc_ssize_t m = utf8proc_map(from, (utf8proc_ssize_t)n, &result, step->mode);
        if (m < 0) sft_die(SFT_BROKEN, "Unicode normalization failed: %s", utf8proc_errmsg(m));
        sft__add(out, (char *)result, (size_t)m);
        free(result);
    } else if (step->kind == SFT__PREPEND) {
        bool stands = n >= step->n && !memcmp(text, step->text, step->n);
        bool wanted = step->mode == SFT__AGAIN || (!stands && (place == SFT__BEGINS || step->mode == SFT__ALWAYS));
        if (wanted && place != SFT__GOES_ON) sft__add(out, step->text, step->n);
        sft__add(out, text, n);
    } else if (step->kind == SFT__REPLACE) {
        sft__replace(step, out, s, text, n, place);
    } else if (step->kind == SFT__BYTES) {
        for (size_t i = 0; i < n; i++) sft__add_char(out, sft__byte_char((uint8_t)text[i]));
    } else if (!sft__add_unspelled(out, text, n)) { // SFT__UNBYTES
        sft__add(out, text, n);
    }
}

// Is it plain to see that normalization leaves the text as it is? ASCII is its own normal form, and for NFC so are
// these ranges, which English and Chinese live in: nothing in them joins the character before it or comes apart for
// good.
static bool sft__normal(const Sft__Step *step, const char *text, size_t n) {
    static const uint32_t nfc[][2] = {{0x4e00, 0x9fff}, {0x3001, 0x3029}, {0xff01, 0xff5e},
                                      {0x80, 0x2ff},    {0x2002, 0x20cf}, {0x1f300, 0x1faff}};
    for (size_t i = 0; i < n;) {
        if (!((uint8_t)text[i] & 0x80)) {
            i++;
            continue;
        }
        uint32_t c = sft__char(text, &i);
        int k = step->mode == SFT__NFC ? 0 : SFT_COUNT(nfc);
        while (k < SFT_COUNT(nfc) && (c < nfc[k][0] || c > nfc[k][1])) k++;
        if (k == SFT_COUNT(nfc)) return false;
    }
    return true;
}

static const char *sft__normalize(const SftTokenizer *t, Sft__Scratch *s, const char *text, size_t *n,
                                  Sft__Place place) {
    for (int i = 0; i < t->normalizer.n && *n; i++) {
        const Sft__Step *step = &t->normalizer.step[i];
        Sft__Bytes *out = &s->normal[text == s->normal[0].p]; // the one that text is not in
        if (step->kind == SFT__UNICODE && sft__normal(step, text, *n)) continue;
        out->n = 0;
        sft__rewrite(step, out, s, text, *n, place);
        text = out->p, *n = out->n;
    }
    return text;
}

// Cuts text[0..n) by the pre-tokenizer's steps from `at` on and encodes the words.
static void sft__pieces(Sft__Encoder *e, int at, const char *text, size_t n, Sft__Place place);

// A text that a step splits. [from, to) is the piece that may still grow; matched: the part it ends with is a match.
typedef struct {
    const Sft__Step *step;
    const char *text;
    size_t from, to;
    Sft__Place place;
    bool matched;
} Sft__Splitter;

static inline void sft__split_off(Sft__Encoder *e, const Sft__Splitter *p) {
    int next = (int)(p->step - e->t->pre_tokenizer.step) + 1;
    if (p->matched && p->step->mode == SFT__REMOVED) return;
    sft__pieces(e, next, p->text + p->from, p->to - p->from, p->from ? SFT__BEHIND : p->place);
}

// The next part of the text, up to `end`, is a match, or what lies between two: it joins the piece or begins a new one.
static inline void sft__split_part(Sft__Encoder *e, Sft__Splitter *p, size_t end, bool match) {
    int mode = p->step->mode;
    match ^= p->step->invert;
    bool joins = mode == SFT__CONTIGUOUS      ? match == p->matched
                 : mode == SFT__WITH_PREVIOUS ? match && !p->matched
                 : mode == SFT__WITH_NEXT     ? !match && p->matched
                                              : false;
    if (!joins) sft__split_off(e, p), p->from = p->to;
    p->to = end, p->matched = match;
}

static void sft__split(Sft__Encoder *e, const Sft__Step *step, const char *text, size_t n, Sft__Place place) {
    Sft__Splitter p = {step, text, 0, 0, place, false};
    Sft__Finder f = SFT__FINDER(step->regex, text, n);
    while (sft__find(&f, e->s)) {
        if (f.from > p.to) sft__split_part(e, &p, f.from, false);
        sft__split_part(e, &p, f.to, true);
    }
    if (n > p.to) sft__split_part(e, &p, n, false);
    sft__split_off(e, &p);
}

static void sft__pieces(Sft__Encoder *e, int at, const char *text, size_t n, Sft__Place place) {
    const Sft__Step *step = &e->t->pre_tokenizer.step[at];
    Sft__Bytes *out = &e->s->step[at];
    if (!n) return;
    if (at == e->t->pre_tokenizer.n) {
        sft__word(e, text, n, false);
    } else if (step->kind == SFT__SPLIT) {
        sft__split(e, step, text, n, place);
    } else {
        out->n = 0;
        sft__rewrite(step, out, e->s, text, n, place);
        sft__pieces(e, at + 1, out->p, out->n, place);
    }
}

/* ================================================================================================================
   Added tokens, encode
   ================================================================================================================ */
static int32_t sft__below(const Sft__Trie *trie, int32_t node, char byte) { // where `byte` leads from node, 0: nowhere
    int32_t next = trie->node[node].child;
    while (next && trie->node[next].byte != (uint8_t)byte) next = trie->node[next].sibling;
    return next;
}

// The longest token of the trie that text[0..n) begins with, and its length; -1 if none.
static int32_t sft__added_at(const Sft__Trie *trie, const char *text, size_t n, size_t *length) {
    int32_t best = -1, node = 0;
    for (size_t k = 0; k < n && (node = sft__below(trie, node, text[k])) > 0;) {
        k++;
        if (trie->node[node].token >= 0) best = trie->node[node].token, *length = k;
    }
    return best;
}

static bool sft__word_char(Sft__Encoder *e, const char *text, size_t n) { // begins with a letter, digit or the like
    Sft__Finder f = SFT__FINDER(e->t->word_char, text, n);
    return n && sft__find(&f, e->s);
}

/* Finds the added tokens of one level (0: text as it is, 1: normalized, 2: none) and hands what lies between them to
   the next. A token may take white space around it (lstrip, rstrip) or ask not to touch a word (single_word). */
static void sft__added(Sft__Encoder *e, int level, const char *text, size_t n, Sft__Place place) {
    const Sft__Trie *trie = &e->t->added[level];
    size_t done = 0, length;
    if (level == 1) text = sft__normalize(e->t, e->s, text, &n, place);
    if (level == 2) {
        sft__pieces(e, 0, text, n, place);
        return;
    }
    for (size_t i = 0; trie->n > 1 && i < n;) {
        int32_t id = trie->begins[(uint8_t)text[i]] ? sft__added_at(trie, text + i, n - i, &length) : -1;
        size_t from = i, to = i + (id < 0 ? 1 : length), last = from;
        i = to;
        if (id < 0) continue;
        int flags = e->t->flags[id];
        if (flags & SFT__WORD) {
            while (last && sft__inside(text[--last])) {}
            if (sft__word_char(e, text + last, from - last) || sft__word_char(e, text + to, n - to)) continue;
        }
        if (flags & SFT__LSTRIP && from > done) from -= sft__white_right(text + done, from - done);
        if (flags & SFT__RSTRIP) to += sft__white_left(text + to, n - to);
        if (from > done) sft__added(e, level + 1, text + done, from - done, done ? SFT__BEHIND : place);
        sft_ids_add(e->out, id);
        done = to;
    }
    if (done < n) sft__added(e, level + 1, text + done, n - done, done ? SFT__BEHIND : place);
}

static void sft__encode(const SftTokenizer *t, SftIds *out, const char *text, size_t n, Sft__Place place) {
    Sft__Encoder e = {t, sft__borrow(t), out};
    sft_ids_room(out, (int64_t)n / 3);
    text = sft__utf8(&e.s->utf8, text, &n);
    if (n) sft__added(&e, 0, text, n, place);
    sft__give(e.s);
}

void sft_encode(const SftTokenizer *t, SftIds *out, const char *text, size_t n, bool add_special) {
    for (int64_t i = 0; add_special && i < t->prefix.n; i++) sft_ids_add(out, t->prefix.ids[i]);
    sft__encode(t, out, text, n, SFT__BEGINS);
    for (int64_t i = 0; add_special && i < t->suffix.n; i++) sft_ids_add(out, t->suffix.ids[i]);
}

/* ================================================================================================================
   Decode
   ================================================================================================================ */
typedef struct { Sft__Bytes text; size_t *end, n; } Sft__Tokens; // tokens side by side; token i ends at end[i]

static const char *sft__token(const Sft__Tokens *tokens, size_t i, size_t *n) {
    size_t from = i ? tokens->end[i - 1] : 0;
    *n = tokens->end[i] - from;
    return tokens->text.p + from;
}

static int sft__hex_byte(const Sft__Tokens *tokens, size_t i) { // what <0x41> means; -1: it is no such token, or none
    size_t n = 0;
    const char *p = i < tokens->n ? sft__token(tokens, i, &n) : NULL;
    bool is = n == 6 && !memcmp(p, "<0x", 3) && isxdigit((uint8_t)p[3]) && isxdigit((uint8_t)p[4]) && p[5] == '>';
    return is ? (int)strtol(p + 3, NULL, 16) : -1;
}

// A run of <0x..> tokens is bytes, and one token; if it is not UTF-8, one U+FFFD per byte.
static void sft__unhex(Sft__Tokens *out, const Sft__Tokens *in, Sft__Bytes *lossy) {
    for (size_t i = 0, n; i < in->n;) {
        size_t begin = out->text.n, run = 0;
        for (int byte; (byte = sft__hex_byte(in, i + run)) >= 0; run++) sft__add(&out->text, (char[1]){(char)byte}, 1);
        const char *token = run ? out->text.p + begin : sft__token(in, i, &n);
        if (!run) {
            sft__add(&out->text, token, n);
        } else if (n = run, sft__utf8(lossy, token, &n) != token) {
            out->text.n = begin;
            for (n = 0; n < run; n++) sft__add(&out->text, "\xef\xbf\xbd", 3);
        }
        out->end[out->n++] = out->text.n;
        i += SFT_MAX(run, 1);
    }
}

// All tokens become one. A character may have come in several of them: only now it shows what is UTF-8.
static void sft__fuse(const Sft__Step *step, Sft__Tokens *out, const Sft__Tokens *in, Sft__Bytes *lossy) {
    size_t n;
    for (size_t i = 0; i < in->n; i++) {
        const char *token = sft__token(in, i, &n);
        if (i) sft__add(&out->text, step->text, step->n);
        sft__add(&out->text, token, n);
    }
    n = out->text.n;
    const char *valid = sft__utf8(lossy, out->text.p, &n);
    if (valid != out->text.p) out->text.n = 0, sft__add(&out->text, valid, n);
    out->end[out->n++] = out->text.n;
}

static void sft__decode_step(const Sft__Step *step, Sft__Tokens *out, const Sft__Tokens *in, Sft__Scratch *s) {
    out->text.n = out->n = 0;
    if (step->kind == SFT__UNHEX) {
        sft__unhex(out, in, &s->utf8);
    } else if (step->kind == SFT__FUSE) {
        sft__fuse(step, out, in, &s->utf8);
    } else {
        for (size_t i = 0, n; i < in->n; i++) {
            const char *token = sft__token(in, i, &n);
            sft__rewrite(step, &out->text, s, token, n, i ? SFT__BEHIND : SFT__BEGINS);
            out->end[out->n++] = out->text.n;
        }
    }
}

char *sft_decode(const SftTokenizer *t, const int32_t *ids, int64_t n, bool skip_special, size_t *bytes) {
    Sft__Scratch *s = sft__borrow(t);
    Sft__Tokens a = {.end = SFT_NEW(size_t, n + 1)}, b = {.end = SFT_NEW(size_t, n + 1)};
    for (int64_t i = 0; i < n; i++) {
        const char *text = sft_token_text(t, ids[i]);
        if (!text || (skip_special && t->flags[ids[i]] & SFT__SPECIAL)) continue;
        size_t length = t->words.length[ids[i]], m = length;
        const char *normal = t->flags[ids[i]] & SFT__NORMALIZED ? sft__normalize(t, s, text, &m, SFT__BEGINS) : text;
        sft__add(&a.text, m ? normal : text, m ? m : length);
        a.end[a.n++] = a.text.n;
    }
    for (int i = 0; i < t->decoder.n && a.n; i++) {
        sft__decode_step(&t->decoder.step[i], &b, &a, s);
        Sft__Tokens swap = a;
        a = b, b = swap;
    }
    sft__give(s);
    if (bytes) *bytes = a.text.n;
    sft__add(&a.text, "", 1);
    free(a.end), free(b.end), free(b.text.p);
    return a.text.p;
}

int64_t sft_vocab_size(const SftTokenizer *t) { return t->words.ids; }
int32_t sft_token_id(const SftTokenizer *t, const char *token) {
    return sft__words_find(&t->words, token, strlen(token));
}
const char *sft_token_text(const SftTokenizer *t, int32_t id) {
    bool none = id < 0 || id >= t->words.ids || t->words.length[id] == SFT__HOLE;
    return none ? NULL : t->words.text.p + t->words.at[id];
}
int32_t sft_bos(const SftTokenizer *t) { return t->bos; }
int32_t sft_eos(const SftTokenizer *t) { return t->eos; }
bool sft_adds_bos(const SftTokenizer *t) { return t->prefix.n > 0; }
const char *sft_chat_template(const SftTokenizer *t) { return t->chat_template; }

/* ================================================================================================================
   Loading: the pipeline's parts
   ================================================================================================================ */
static const char *sft__string(const SftTokenizer *t, json_t *o, const char *key, const char *absent) {
    json_t *v = json_object_get(o, key);
    if ((!v || json_is_null(v)) && absent) return absent;
    if (!json_is_string(v)) sft__bad(t, "\"%s\" must be a string%s", key, v ? "" : ", and is missing");
    return json_string_value(v);
}

static bool sft__truth(const SftTokenizer *t, json_t *o, const char *key, bool absent) {
    json_t *v = json_object_get(o, key);
    if (!v || json_is_null(v)) return absent;
    if (!json_is_boolean(v)) sft__bad(t, "\"%s\" must be true or false", key);
    return json_is_true(v);
}

static json_t *sft__array(const SftTokenizer *t, json_t *o, const char *key) {
    json_t *v = json_object_get(o, key);
    if (!json_is_array(v)) sft__bad(t, "\"%s\" must be a list%s", key, v ? "" : ", and is missing");
    return v;
}

static int32_t sft__id(const SftTokenizer *t, json_t *v, const char *token) {
    if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > SFT__MAX_ID)
        sft__bad(t, "the id of \"%.80s\" must be a whole number from 0 to %d", token, SFT__MAX_ID);
    return (int32_t)json_integer_value(v);
}

// The place of o's `key` among n words.
static int sft__choice(const SftTokenizer *t, json_t *o, const char *key, const char *absent, const char *const *words,
                       int n) {
    const char *word = sft__string(t, o, key, absent);
    for (int i = 0; i < n; i++)
        if (!strcmp(word, words[i])) return i;
    sft__bad(t, "%s \"%.80s\" is not supported", key, word);
}

static Sft__Step *sft__step(const SftTokenizer *t, Sft__Pipeline *p, Sft__Kind kind, const char *text, int mode) {
    if (p->n == SFT__STEPS) sft__bad(t, "more than %d steps in one pipeline are not supported", SFT__STEPS);
    Sft__Step *step = &p->step[p->n++];
    *step = (Sft__Step){.kind = kind, .n = strlen(text), .text = sft_format("%s", text), .from = ' ', .mode = mode};
    return step;
}

static Sft__Step *sft__regex_step(const SftTokenizer *t, Sft__Pipeline *p, Sft__Kind kind, int mode,
                                  const char *regex) {
    Sft__Step *step = sft__step(t, p, kind, "", mode);
    step->regex = sft__regex(t, regex, strlen(regex));
    return step;
}

// What a step looks for: this text. To replace a single byte no regex is needed.
static void sft__look_for(const SftTokenizer *t, Sft__Step *step, const char *text) {
    if (strlen(text) == 1 && step->kind == SFT__REPLACE) step->from = *text;
    else step->regex = sft__literal(t, "", text, "");
}

static void sft__pattern(const SftTokenizer *t, Sft__Step *step, json_t *o) { // {"String": ...} or {"Regex": ...}
    json_t *pattern = json_object_get(o, "pattern");
    const char *text = json_string_value(json_object_get(pattern, "String"));
    if (text) sft__look_for(t, step, text);
    else text = sft__string(t, pattern, "Regex", NULL), step->regex = sft__regex(t, text, strlen(text));
}

typedef void Sft__Load(SftTokenizer *t, json_t *o);
// If o is a Sequence, loads each of its parts, which stand under `key`.
static bool sft__sequence(SftTokenizer *t, json_t *o, const char *key, Sft__Load *load) {
    if (strcmp(sft__string(t, o, "type", NULL), "Sequence")) return false;
    json_t *list = sft__array(t, o, key);
    for (size_t i = 0; i < json_array_size(list); i++) load(t, json_array_get(list, i));
    return true;
}

SFT_NORETURN static void sft__unsupported(const SftTokenizer *t, const char *what, json_t *o) {
    sft__bad(t, "%s \"%.80s\" is not supported", what, sft__string(t, o, "type", NULL));
}

static bool sft__is(json_t *o, const char *type) { // behind sft__sequence, which sees to it that there is a type
    return !strcmp(json_string_value(json_object_get(o, "type")), type);
}

static void sft__load_normalizer(SftTokenizer *t, json_t *o) {
    static const char *const forms[] = {"NFC", "NFD", "NFKC", "NFKD"};
    static const int options[] = {UTF8PROC_COMPOSE, UTF8PROC_DECOMPOSE, UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
                                  UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT};
    if (sft__sequence(t, o, "normalizers", sft__load_normalizer)) return;
    Sft__Pipeline *p = &t->normalizer;
    if (sft__is(o, "Prepend")) {
        sft__step(t, p, SFT__PREPEND, sft__string(t, o, "prepend", NULL), SFT__AGAIN);
    } else if (sft__is(o, "Replace")) {
        sft__pattern(t, sft__step(t, p, SFT__REPLACE, sft__string(t, o, "content", NULL), 0), o);
    } else if (sft__is(o, "Strip")) { // white space at the ends
        if (sft__truth(t, o, "strip_left", true)) sft__regex_step(t, p, SFT__REPLACE, 0, "\\A\\s+");
        if (sft__truth(t, o, "strip_right", true)) sft__regex_step(t, p, SFT__REPLACE, 0, "(?<!\\s)\\s+\\z");
    } else {
        int form = 0;
        while (form < 4 && !sft__is(o, forms[form])) form++;
        if (form == 4) sft__unsupported(t, "normalizer", o);
        sft__step(t, p, SFT__UNICODE, "", UTF8PROC_STABLE | options[form]);
    }
}

static int sft__scheme(SftTokenizer *t, json_t *o) { // older files say add_prefix_space
    static const char *const words[] = {"never", "first", "always"};
    const char *absent = sft__truth(t, o, "add_prefix_space", true) ? "always" : "never";
    return sft__choice(t, o, "prepend_scheme", absent, words, 3);
}

static void sft__load_pre_tokenizer(SftTokenizer *t, json_t *o) {
    static const char *const modes[] = {"Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"};
    if (sft__sequence(t, o, "pretokenizers", sft__load_pre_tokenizer)) return;
    Sft__Pipeline *p = &t->pre_tokenizer;
    if (sft__is(o, "Split")) {
        Sft__Step *step = sft__step(t, p, SFT__SPLIT, "", sft__choice(t, o, "behavior", NULL, modes, 5));
        step->invert = sft__truth(t, o, "invert", false);
        sft__pattern(t, step, o);
    } else if (sft__is(o, "ByteLevel")) {
        if (sft__truth(t, o, "add_prefix_space", true)) sft__step(t, p, SFT__PREPEND, " ", SFT__ALWAYS);
        if (sft__truth(t, o, "use_regex", true)) sft__regex_step(t, p, SFT__SPLIT, SFT__ISOLATED, SFT__GPT2);
        sft__step(t, p, SFT__BYTES, "", 0);
    } else if (sft__is(o, "Digits")) {
        bool each = sft__truth(t, o, "individual_digits", false);
        sft__regex_step(t, p, SFT__SPLIT, each ? SFT__ISOLATED : SFT__CONTIGUOUS, "\\p{N}");
    } else if (sft__is(o, "Metaspace")) {
        const char *mark = sft__string(t, o, "replacement", "\xe2\x96\x81");
        int scheme = sft__scheme(t, o);
        sft__step(t, p, SFT__REPLACE, mark, 0);
        if (scheme != SFT__NEVER) sft__step(t, p, SFT__PREPEND, mark, scheme);
        if (sft__truth(t, o, "split", true)) sft__look_for(t, sft__step(t, p, SFT__SPLIT, "", SFT__WITH_NEXT), mark);
    } else if (sft__is(o, "Punctuation")) {
        int mode = sft__choice(t, o, "behavior", "Isolated", modes, 5);
        sft__regex_step(t, p, SFT__SPLIT, mode, "[!-/:-@\\[-`{-~\\p{P}]");
    } else if (sft__is(o, "Whitespace")) {
        sft__regex_step(t, p, SFT__SPLIT, SFT__REMOVED, "\\w+|[^\\w\\s]+")->invert = true;
    } else if (sft__is(o, "WhitespaceSplit")) {
        sft__regex_step(t, p, SFT__SPLIT, SFT__REMOVED, "\\s");
    } else {
        sft__unsupported(t, "pre_tokenizer", o);
    }
}

// Takes up to o's `key` times the text off one side of every token.
static void sft__strip_step(SftTokenizer *t, json_t *o, const char *key, const char *before, const char *behind) {
    json_int_t times = json_integer_value(json_object_get(o, key));
    char repeated[64];
    snprintf(repeated, sizeof repeated, "){1,%lld}%s", (long long)times, behind);
    const char *content = sft__string(t, o, "content", NULL);
    if (!*content) sft__bad(t, "the decoder Strip has no content");
    if (times > 0) sft__step(t, &t->decoder, SFT__REPLACE, "", 0)->regex = sft__literal(t, before, content, repeated);
}

static void sft__load_decoder(SftTokenizer *t, json_t *o) {
    if (sft__sequence(t, o, "decoders", sft__load_decoder)) return;
    Sft__Pipeline *p = &t->decoder;
    if (sft__is(o, "ByteLevel")) {
        sft__step(t, p, SFT__UNBYTES, "", 0), sft__step(t, p, SFT__FUSE, "", 0);
    } else if (sft__is(o, "Replace")) {
        sft__pattern(t, sft__step(t, p, SFT__REPLACE, sft__string(t, o, "content", NULL), 0), o);
    } else if (sft__is(o, "ByteFallback")) {
        sft__step(t, p, SFT__UNHEX, "", 0);
    } else if (sft__is(o, "Fuse")) {
        sft__step(t, p, SFT__FUSE, "", 0);
    } else if (sft__is(o, "Strip")) {
        sft__strip_step(t, o, "start", "\\A(?:", ""), sft__strip_step(t, o, "stop", "(?:", "\\z");
    } else if (sft__is(o, "Metaspace")) {
        int mode = sft__scheme(t, o) == SFT__NEVER ? 0 : SFT__FIRST;
        sft__look_for(t, sft__step(t, p, SFT__REPLACE, " ", mode), sft__string(t, o, "replacement", NULL));
    } else {
        sft__unsupported(t, "decoder", o);
    }
}

static void sft__load_post_processor(SftTokenizer *t, json_t *o) {
    if (sft__sequence(t, o, "processors", sft__load_post_processor) || sft__is(o, "ByteLevel")) return; // no ids
    if (!sft__is(o, "TemplateProcessing")) sft__unsupported(t, "post_processor", o);
    json_t *single = sft__array(t, o, "single"), *part, *v;
    SftIds *to = &t->prefix;
    size_t i, k;
    json_array_foreach(single, i, part) {
        json_t *token = json_object_get(part, "SpecialToken");
        if (!token && (!json_object_get(part, "Sequence") || to == &t->suffix))
            sft__bad(t, "post_processor: \"single\" must hold SpecialToken and one Sequence");
        if (!token) to = &t->suffix;
        if (!token) continue;
        const char *name = sft__string(t, token, "id", NULL);
        json_t *ids = sft__array(t, json_object_get(json_object_get(o, "special_tokens"), name), "ids");
        json_array_foreach(ids, k, v) {
            if (!sft_token_text(t, sft__id(t, v, name)))
                sft__bad(t, "post_processor: no token has the id %d of \"%.80s\"", sft__id(t, v, name), name);
            sft_ids_add(to, sft__id(t, v, name));
        }
    }
    if (to == &t->prefix) sft__bad(t, "post_processor: \"single\" has no Sequence");
}

/* ================================================================================================================
   Loading: vocabulary, merges, added tokens, and the tables made of them
   ================================================================================================================ */
// {"token": id, ...}, and room for the added tokens.
static void sft__load_vocab(SftTokenizer *t, json_t *o, json_t *added) {
    const char *token;
    json_t *v;
    size_t i;
    int32_t highest = -1;
    if (!json_is_object(o)) sft__bad(t, "\"vocab\" must be an object of tokens and their ids");
    json_array_foreach(added, i, v)
        highest = SFT_MAX(highest, sft__id(t, json_object_get(v, "id"), sft__string(t, v, "content", NULL)));
    json_object_foreach(o, token, v) highest = SFT_MAX(highest, sft__id(t, v, token));
    sft__words_open(&t->words, highest + 1, json_object_size(o) + json_array_size(added));
    json_object_foreach(o, token, v) {
        int32_t id = (int32_t)json_integer_value(v);
        const char *other = sft_token_text(t, id);
        if (other) sft__bad(t, "\"%.80s\" and \"%.80s\" have the same id %d", other, token, id);
        sft__words_put(&t->words, token, strlen(token), id);
    }
}

static void sft__merges_open(SftTokenizer *t, size_t n) {
    if (n >= INT32_MAX) sft__bad(t, "%zu merges are too many", n);
    for (t->merge_mask = 15; t->merge_mask < n + n / 2; t->merge_mask = 2 * t->merge_mask + 1) {}
    size_t bytes = (t->merge_mask + 1) * sizeof *t->merge;
    t->merge = memset(sft_alloc(bytes), 0xff, bytes);
    for (t->filter_shift = 58; (UINT64_C(1) << (64 - t->filter_shift)) < 12 * n; t->filter_shift--) {}
    t->filter = SFT_NEW(uint64_t, UINT64_C(1) << (58 - t->filter_shift));
}

static void sft__put_merge(SftTokenizer *t, int32_t a, int32_t b, uint32_t rank, int32_t id) {
    uint64_t pair = (uint64_t)(uint32_t)a << 32 | (uint32_t)b, h = pair * 0x9e3779b97f4a7c15u, i = h >> 20;
    t->filter[h >> t->filter_shift >> 6] |= UINT64_C(1) << (h >> t->filter_shift) % 64;
    while (t->merge[i & t->merge_mask].pair != SFT__NONE && t->merge[i & t->merge_mask].pair != pair) i++;
    t->merge[i & t->merge_mask] = (Sft__Merge){pair, rank, id}; // of a pair that comes twice the later counts
}

// The merge of two strings to the token that they spell together.
static void sft__merge_of(SftTokenizer *t, Sft__Bytes *joined, size_t rank, const char *a, size_t n, const char *b,
                          size_t m) {
    joined->n = 0;
    sft__add(joined, a, n), sft__add(joined, b, m), sft__add(joined, "", 1);
    int32_t left = sft__words_find(&t->words, a, n), right = sft__words_find(&t->words, b, m);
    int32_t id = sft__words_find(&t->words, joined->p, n + m);
    if (left < 0 || right < 0 || id < 0)
        sft__bad(t, "merge %zu (\"%.*s\" \"%.*s\"): \"%.200s\" is not in the vocabulary", rank + 1,
                 (int)SFT_MIN(n, 80), a, (int)SFT_MIN(m, 80), b, left < 0 ? a : right < 0 ? b : joined->p);
    sft__put_merge(t, left, right, (uint32_t)rank, id);
}

static void sft__load_merges(SftTokenizer *t, json_t *list) { // each "left right" or ["left", "right"]
    Sft__Bytes joined = {0};
    size_t rank = 0, i;
    json_t *v;
    sft__merges_open(t, json_array_size(list));
    json_array_foreach(list, i, v) {
        json_t *x = json_array_get(v, 0), *y = json_array_get(v, 1);
        const char *s = json_string_value(v), *space = s ? strchr(s, ' ') : NULL;
        if (s && !strncmp(s, "#version", 8)) continue;
        bool pair = json_array_size(v) == 2 && json_is_string(x) && json_is_string(y);
        if (!pair && (!space || strchr(space + 1, ' ')))
            sft__bad(t, "merge %zu must be \"left right\" or [\"left\", \"right\"]", i + 1);
        const char *a = s ? s : json_string_value(x), *b = s ? space + 1 : json_string_value(y);
        sft__merge_of(t, &joined, rank++, a, s ? (size_t)(space - s) : strlen(a), b, strlen(b));
    }
    free(joined.p);
}

typedef struct { double score; int32_t id; } Sft__Scored;
static int sft__falling(const void *x, const void *y) {
    const Sft__Scored *a = x, *b = y;
    return (a->score < b->score) - (a->score > b->score);
}

/* SentencePiece has no list of merges: two neighbours are joined if the vocabulary has what they spell together, the
   piece of the highest score first, leftmost among equals. So every way to split a piece in two is a merge, and its
   rank is the piece's place among all, equal scores in one place. list: by id; null: the piece takes no part. */
static void sft__load_scores(SftTokenizer *t, json_t *list) {
    const Sft__Words *w = &t->words;
    Sft__Scored *sorted = SFT_NEW(Sft__Scored, w->ids);
    int64_t *rank = memset(SFT_NEW(int64_t, w->ids), 0xff, (size_t)w->ids * sizeof *rank); // by id; -1: takes no part
    size_t n = 0, splits = 0, id;
    json_t *v;
    json_array_foreach(list, id, v) {
        if (json_is_null(v)) continue;
        sorted[n++] = (Sft__Scored){json_real_value(v), (int32_t)id};
        splits += w->length[id];
    }
    qsort(sorted, n, sizeof *sorted, sft__falling);
    for (size_t i = 0; i < n; i++)
        rank[sorted[i].id] = i && sorted[i].score == sorted[i - 1].score ? rank[sorted[i - 1].id] : (int64_t)i;
    sft__merges_open(t, splits);
    for (id = 0; id < json_array_size(list); id++) {
        const char *text = w->text.p + w->at[id];
        for (size_t k = sft__length(*text); rank[id] >= 0 && k < w->length[id]; k += sft__length(text[k])) {
            int32_t a = sft__words_find(w, text, k), b = sft__words_find(w, text + k, w->length[id] - k);
            if (a >= 0 && b >= 0 && rank[a] >= 0 && rank[b] >= 0)
                sft__put_merge(t, a, b, (uint32_t)rank[id], (int32_t)id);
        }
    }
    free(sorted), free(rank);
}

// A place for the id of the token with this text, which is not empty.
static int32_t *sft__trie_put(Sft__Trie *trie, const char *text, size_t n) {
    int32_t node = 0, next;
    trie->begins[(uint8_t)*text] = true;
    for (size_t k = 0; k < n; k++, node = next) {
        if ((next = sft__below(trie, node, text[k])) > 0) continue;
        next = trie->n++;
        if (!(next & (next - 1))) trie->node = sft_realloc(trie->node, 2 * (size_t)next * sizeof *trie->node);
        trie->node[next] = (Sft__Node){0, trie->node[node].child, -1, (uint8_t)text[k]};
        trie->node[node].child = next;
    }
    return &trie->node[node].token;
}

/* Added tokens: {"id", "content", flags}. With a tokenizer.json, those that say "normalized" are looked for as the
   normalizer spells them, and an id has one name; without (bare), a token may rename an id of the vocabulary. */
static void sft__load_added(SftTokenizer *t, json_t *o, bool bare) {
    static const char *const flags[] = {"special", "lstrip", "rstrip", "single_word"};
    const char *content = sft__string(t, o, "content", NULL), *text = content;
    int32_t id = (int32_t)json_integer_value(json_object_get(o, "id")), other = sft_token_id(t, content), *place;
    const char *name = sft_token_text(t, id);
    size_t n = strlen(content);
    if (!n) sft__bad(t, "the added token with id %d is empty", id);
    if (other >= 0 && other != id)
        sft__bad(t, "the added token \"%.80s\" has id %d, the vocabulary says %d", content, id, other);
    if (other < 0 && name && !bare)
        sft__bad(t, "the added token \"%.80s\" has id %d, which is \"%.80s\"", content, id, name);
    if (other < 0) sft__words_put(&t->words, content, n, id);
    for (int k = 0; k < SFT_COUNT(flags); k++) t->flags[id] |= (uint8_t)(sft__truth(t, o, flags[k], false) << k);
    bool normalized = sft__truth(t, o, "normalized", !(t->flags[id] & SFT__SPECIAL));
    if (normalized && !bare) t->flags[id] |= SFT__NORMALIZED;
    Sft__Scratch *s = sft__borrow(t);
    if (t->flags[id] & SFT__NORMALIZED) text = sft__normalize(t, s, content, &n, SFT__BEGINS);
    if (n && *(place = sft__trie_put(&t->added[normalized], text, n)) >= 0)
        sft__bad(t, "the added token \"%.80s\" comes twice", content);
    if (n) *place = id;
    sft__give(s);
    const char begins[] = "\\A[" SFT__WORDS "\\x{200c}\\x{200d}]";
    if (t->flags[id] & SFT__WORD && !t->word_char) t->word_char = sft__compile(t, begins, strlen(begins));
}

static void sft__load_added_list(SftTokenizer *t, json_t *list, bool bare) {
    size_t i;
    json_t *o;
    t->flags = SFT_NEW(uint8_t, t->words.ids);
    for (int k = 0; k < 2; k++) t->added[k].node = SFT_NEW(Sft__Node, 1), t->added[k].n = 1;
    json_array_foreach(list, i, o) sft__load_added(t, o, bare);
}

// What byte-level tokens stand for, byte for byte. Tokens with other characters never come out of text and have none.
static void sft__load_raw(SftTokenizer *t) {
    const Sft__Words *w = &t->words;
    Sft__Bytes raw = {0};
    sft__words_open(&t->raw, w->ids, (size_t)w->ids);
    for (int32_t id = 0; id < w->ids; id++) {
        raw.n = 0;
        if (w->length[id] == SFT__HOLE || !w->length[id]) continue;
        if (sft__add_unspelled(&raw, w->text.p + w->at[id], w->length[id])) sft__words_put(&t->raw, raw.p, raw.n, id);
    }
    free(raw.p);
}

/* Enters every merge into t->joined (see sft__join), or leaves that NULL where cuts would not be sound: where a merge
   takes the unknown token or a byte's token <0x..>, which are not spelled as their text, or where bytes are unknown. */
static void sft__load_joined(SftTokenizer *t) {
    const Sft__Words *w = t->byte_level ? &t->raw : &t->words;
    if (t->byte_level && !t->all_known) return;
    uint8_t *joined = SFT_NEW(uint8_t, SFT__JOINED / 8);
    for (uint64_t i = 0; i <= t->merge_mask; i++) {
        if (t->merge[i].pair == SFT__NONE) continue;
        int32_t a = (int32_t)(t->merge[i].pair >> 32), b = (int32_t)(uint32_t)t->merge[i].pair;
        bool sound = t->byte_level || (a != t->unk && b != t->unk && w->length[a] && w->length[b]);
        for (int k = 0; k < 256 && sound && t->byte_fallback; k++) sound = a != t->byte_id[k] && b != t->byte_id[k];
        if (!sound) {
            free(joined);
            return;
        }
        if (w->length[a] == SFT__HOLE || w->length[b] == SFT__HOLE) continue;
        const char *left = w->text.p + w->at[a], *right = w->text.p + w->at[b];
        size_t n = w->length[a], last = n - 1, first = 0;
        while (last && sft__inside(left[last])) last--;
        bool part = sft__inside(left[last]); // nothing but the end of a character
        if (sft__inside(*right) || (!part && last + sft__length(left[last]) != n)) continue; // joins inside a character
        bool begun = sft__length(*right) > w->length[b]; // nothing but the beginning of one
        uint32_t x = part ? SFT__PART + (uint32_t)(uint8_t)left[n - 1] : sft__char(left, &last);
        uint32_t y = begun ? SFT__PART + (uint32_t)(uint8_t)*right : sft__char(right, &first), bit = sft__join(x, y);
        joined[bit / 8] |= (uint8_t)(1 << bit % 8);
    }
    t->joined = joined;
}

// Tables that the inner loops read, once vocabulary, merges and pipelines stand.
static void sft__load_tables(SftTokenizer *t) {
    Sft__Pipeline *p = &t->pre_tokenizer;
    t->byte_level = p->n && p->step[p->n - 1].kind == SFT__BYTES && !t->byte_fallback;
    if (t->byte_level) free(p->step[--p->n].text); // bytes are looked up as bytes instead
    if (t->byte_level) sft__load_raw(t);
    t->all_known = t->byte_level || t->byte_fallback;
    for (int b = 0; b < 256; b++) {
        char name[8];
        snprintf(name, sizeof name, "<0x%02X>", b);
        t->byte_id[b] = t->byte_level ? sft__words_find(&t->raw, &(char){(char)b}, 1) : sft_token_id(t, name);
        t->all_known = t->all_known && t->byte_id[b] >= 0;
    }
    sft__load_joined(t);
}

/* ================================================================================================================
   Loading: the files
   ================================================================================================================ */
// The id of a special token that tokenizer_config.json names, else config.json by id; -1: neither does, or it is null.
static int32_t sft__special_id(SftTokenizer *t, json_t *config, json_t *model, const char *key, int32_t absent) {
    char id_key[32];
    json_t *v = json_object_get(config, key);
    if (json_is_object(v)) v = json_object_get(v, "content");
    const char *name = json_string_value(v);
    if (name && sft_token_id(t, name) < 0)
        sft__bad(t, "tokenizer_config.json's %s \"%.80s\" is not in the vocabulary", key, name);
    if (name) return sft_token_id(t, name);
    if (v && !json_is_null(v))
        sft__bad(t, "tokenizer_config.json's %s must be a string or an object with \"content\"", key);
    snprintf(id_key, sizeof id_key, "%s_id", key);
    json_t *id = json_object_get(model, id_key);
    if (json_is_array(id)) id = json_array_get(id, 0);
    if (v || !json_is_integer(id)) return v ? -1 : absent;
    json_int_t i = json_integer_value(id);
    return i >= 0 && i < t->words.ids && sft_token_text(t, (int32_t)i) ? (int32_t)i : absent;
}

// The chat template: chat_template.jinja, or tokenizer_config.json's, of several the one named "default".
static char *sft__load_chat_template(SftTokenizer *t, json_t *config, const char *folder) {
    char path[4096];
    if (sft_exists(sft_path(path, folder, "chat_template.jinja"))) return sft_read_file(path, NULL);
    json_t *v = json_object_get(config, "chat_template"), *list = json_is_array(v) ? v : NULL, *o;
    size_t i;
    if (list) v = json_object_get(json_array_get(list, 0), "template");
    json_array_foreach(list, i, o) {
        const char *name = json_string_value(json_object_get(o, "name"));
        if (name && !strcmp(name, "default")) v = json_object_get(o, "template");
    }
    if (v && !json_is_null(v) && !json_is_string(v))
        sft__bad(t, "tokenizer_config.json's chat_template must be a string or a list of {\"name\", \"template\"}");
    return json_is_string(v) ? sft_format("%s", json_string_value(v)) : NULL;
}

// Adds a token to the list of added tokens, unless its id stands there already.
static void sft__also(json_t *added, int32_t id, const char *content, bool special, bool normalized) {
    size_t i;
    json_t *o;
    bool listed = id < 0;
    json_array_foreach(added, i, o) listed = listed || json_integer_value(json_object_get(o, "id")) == id;
    if (!listed)
        json_array_append_new(added, json_pack("{s:i,s:s,s:b,s:b}", "id", id, "content", content, "special", special,
                                               "normalized", normalized));
}

// Special tokens that tokenizer_config.json names are added tokens too, as in transformers.
static void sft__also_named(SftTokenizer *t, json_t *config, json_t *added) {
    static const char *const keys[] = {"bos_token", "eos_token", "unk_token", "pad_token"};
    for (int k = 0; k < SFT_COUNT(keys); k++) {
        json_t *v = json_object_get(config, keys[k]);
        const char *name = json_string_value(json_is_object(v) ? json_object_get(v, "content") : v);
        if (name) sft__also(added, sft_token_id(t, name), name, true, false);
    }
}

// For folders without a tokenizer.json: the added tokens of tokenizer_config.json, {"id": {"content", flags}}.
static json_t *sft__config_added(SftTokenizer *t, json_t *config) {
    json_t *list = json_array(), *v;
    const char *key;
    json_object_foreach(json_object_get(config, "added_tokens_decoder"), key, v) {
        char *end;
        long id = strtol(key, &end, 10);
        if (!*key || *end || id < 0 || id > SFT__MAX_ID || !json_is_object(v))
            sft__bad(t, "added_tokens_decoder of tokenizer_config.json: \"%.40s\" must be an id with an object", key);
        json_array_append_new(list, v = json_deep_copy(v));
        json_object_set_new(v, "id", json_integer(id));
        json_object_set_new(v, "normalized", json_false());
    }
    return list;
}

static json_t *sft__present(const SftTokenizer *t, json_t *o, const char *key) { // an object; NULL: null, or nothing
    json_t *v = json_object_get(o, key);
    if (v && !json_is_null(v) && !json_is_object(v)) sft__bad(t, "\"%s\" must be an object or null", key);
    return json_is_object(v) ? v : NULL;
}

// tokenizer.json, or what was made of other files (bare: see sft__load_added).
static void sft__load_json(SftTokenizer *t, json_t *root, json_t *config, bool bare) {
    json_t *model = json_object_get(root, "model"), *o, *added = json_object_get(root, "added_tokens");
    if (!json_is_object(model)) sft__bad(t, "has no \"model\"");
    const char *type = sft__string(t, model, "type", "BPE"), *unk = sft__string(t, model, "unk_token", "");
    if (strcmp(type, "BPE")) sft__bad(t, "a model of type %.40s is not supported, only BPE", type);
    if (*sft__string(t, model, "continuing_subword_prefix", "") || *sft__string(t, model, "end_of_word_suffix", ""))
        sft__bad(t, "continuing_subword_prefix and end_of_word_suffix are not supported");
    if (json_number_value(json_object_get(model, "dropout")) != 0) sft__bad(t, "BPE dropout is not supported");
    if (!added || json_is_null(added)) json_object_set_new(root, "added_tokens", json_array());
    added = sft__array(t, root, "added_tokens");
    sft__load_vocab(t, json_object_get(model, "vocab"), added);
    if (bare && (o = json_object_get(model, "scores"))) sft__load_scores(t, o);
    else sft__load_merges(t, sft__array(t, model, "merges"));
    t->byte_fallback = sft__truth(t, model, "byte_fallback", false);
    t->fuse_unk = sft__truth(t, model, "fuse_unk", false);
    t->ignore_merges = sft__truth(t, model, "ignore_merges", false);
    if (*unk && (t->unk = sft_token_id(t, unk)) < 0) sft__bad(t, "unk_token \"%.80s\" is not in the vocabulary", unk);
    if ((o = sft__present(t, root, "normalizer"))) sft__load_normalizer(t, o);
    if ((o = sft__present(t, root, "pre_tokenizer"))) sft__load_pre_tokenizer(t, o);
    if ((o = sft__present(t, root, "decoder"))) sft__load_decoder(t, o);
    else sft__step(t, &t->decoder, SFT__FUSE, " ", 0);
    sft__load_tables(t);
    sft__also_named(t, config, added);
    sft__load_added_list(t, added, bare);
    if ((o = sft__present(t, root, "post_processor"))) sft__load_post_processor(t, o);
}

// vocab.json + merges.txt, as OpenAI published GPT-2's, as a tokenizer.json; the rest of the pipeline is GPT-2's.
static json_t *sft__read_gpt2(SftTokenizer *t, const char *merges, json_t *config) {
    json_t *vocab = sft_json_file(t->file), *lines = json_array(), *added = sft__config_added(t, config), *merge;
    char *text = sft_read_file(merges, NULL), *line = text;
    while (*line) {
        size_t n = strcspn(line, "\r\n");
        merge = json_stringn(line, n);
        if (!merge) sft__bad(t, "%s, line %zu: is not UTF-8", merges, json_array_size(lines) + 1);
        json_array_append_new(lines, merge);
        line += n;
        line += *line == '\r';
        line += *line == '\n';
    }
    free(text);
    json_t *end = json_object_get(vocab, "<|endoftext|>");
    t->bos = t->eos = json_is_integer(end) ? (int32_t)json_integer_value(end) : -1;
    sft__also(added, t->eos, "<|endoftext|>", true, false);
    json_t *bytes = json_pack("{s:s,s:b}", "type", "ByteLevel", "add_prefix_space",
                              sft__truth(t, config, "add_prefix_space", false));
    return json_pack("{s:{s:o,s:o},s:o,s:O,s:o}", "model", "vocab", vocab, "merges", lines, "added_tokens", added,
                     "pre_tokenizer", bytes, "decoder", bytes);
}

// Protocol buffers: a message is a row of fields, each a number, a wire type and a value.
typedef struct {
    const SftTokenizer *t;
    const uint8_t *p, *end, *bytes;
    uint64_t value;
    size_t n;
    int field;
} Sft__Proto;

static uint64_t sft__varint(Sft__Proto *m) { // seven bits a byte, lowest first, the eighth says that more follow
    uint64_t v = 0;
    for (int shift = 0; shift < 64 && m->p < m->end; shift += 7) {
        v |= (uint64_t)(*m->p & 127) << shift;
        if (*m->p++ < 128) return v;
    }
    sft__bad(m->t, "is not a SentencePiece model, or damaged");
}

static bool sft__field(Sft__Proto *m) { // the next field; false at the end
    if (m->p == m->end) return false;
    uint64_t tag = sft__varint(m), wire = tag & 7, n;
    m->field = (int)SFT_MIN(tag >> 3, 1000);
    if (wire == 0) m->value = sft__varint(m);
    n = wire == 0 ? 0 : wire == 1 ? 8 : wire == 5 ? 4 : wire == 2 ? sft__varint(m) : UINT64_MAX;
    if (n > (uint64_t)(m->end - m->p)) sft__bad(m->t, "is not a SentencePiece model, or damaged");
    m->bytes = m->p, m->n = (size_t)n;
    m->p += n;
    return true;
}

// A SentencePiece model (sentencepiece_model.proto): pieces with scores and types, and how text is to be normalized.
enum { SFT__NORMAL = 1, SFT__UNKNOWN, SFT__CONTROL, SFT__USER, SFT__UNUSED, SFT__BYTE };
typedef struct {
    json_t *vocab, *added, *scores; // scores: by id; null: takes no part in merges
    uint64_t type;                  // of the model: 2 is BPE
    bool prefix, squeeze, bytes;    // "▁" before the text; runs of spaces become one; byte_fallback
} Sft__Pieces;

static void sft__read_piece(SftTokenizer *t, Sft__Pieces *p, Sft__Proto m) {
    json_t *piece = NULL;
    float score = 0;
    uint64_t type = SFT__NORMAL;
    int32_t id = (int32_t)json_array_size(p->scores);
    while (sft__field(&m)) {
        if (m.field == 1) json_decref(piece), piece = json_stringn((const char *)m.bytes, m.n);
        if (m.field == 2 && m.n == 4) memcpy(&score, m.bytes, 4);
        if (m.field == 3) type = m.value;
    }
    const char *text = json_string_value(piece);
    size_t n = json_string_length(piece);
    bool twice = json_object_get(p->vocab, text) != NULL;
    if (!n || n > 1000 || strlen(text) != n || !isfinite(score) || twice || id > SFT__MAX_ID)
        sft__bad(t, "piece %d is empty, too long, not UTF-8, comes twice or has no score", id);
    if (type < SFT__NORMAL || type > SFT__BYTE || type == SFT__UNUSED)
        sft__bad(t, "piece \"%.80s\" is of a type that is not supported (%llu)", text, (unsigned long long)type);
    json_object_set_new(p->vocab, text, json_integer(id));
    if (type != SFT__NORMAL && type != SFT__BYTE) sft__also(p->added, id, text, type != SFT__USER, type == SFT__USER);
    bool merges = type == SFT__NORMAL || type == SFT__USER;
    json_array_append_new(p->scores, merges ? json_real((double)score) : json_null());
    json_decref(piece);
}

static void sft__read_trainer(SftTokenizer *t, Sft__Pieces *p, Sft__Proto m) {
    int32_t *special[] = {&t->unk, &t->bos, &t->eos};
    while (sft__field(&m)) {
        if (m.field == 3) p->type = m.value;
        if (m.field == 24 && m.value) sft__bad(t, "treat_whitespace_as_suffix is not supported");
        if (m.field == 35) p->bytes = m.value != 0;
        if (m.field >= 40 && m.field <= 42) *special[m.field - 40] = (int32_t)m.value;
    }
}

static void sft__read_normalizer(SftTokenizer *t, Sft__Pieces *p, Sft__Proto m) {
    while (sft__field(&m)) {
        if (m.field == 2 && m.n)
            sft__bad(t, "SentencePiece's own Unicode normalization (precompiled_charsmap) is not supported");
        if (m.field == 3) p->prefix = m.value != 0;
        if (m.field == 4) p->squeeze = m.value != 0;
        if (m.field == 5 && !m.value) sft__bad(t, "escape_whitespaces = false is not supported");
    }
}

// What a SentencePiece model does around its merges, as a tokenizer.json says it.
#define SFT__JSON(...) #__VA_ARGS__
static const char sft__around_pieces[] = SFT__JSON({
    "normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "\\A +|[ ▁]+\\z"}, "content": ""},
        {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1}]}
});

static json_t *sft__read_sentencepiece(SftTokenizer *t, json_t *config) {
    size_t n;
    const char *data = sft_map(t->file, &n);
    Sft__Pieces p = {json_object(), sft__config_added(t, config), json_array(), 0, true, true, false};
    Sft__Proto m = {.t = t, .p = (const uint8_t *)data, .end = (const uint8_t *)data + n};
    t->unk = 0, t->bos = 1, t->eos = 2; // if nothing else is said
    while (sft__field(&m)) {
        Sft__Proto part = {.t = t, .p = m.bytes, .end = m.bytes + m.n};
        if (m.field == 1) sft__read_piece(t, &p, part);
        if (m.field == 2) sft__read_trainer(t, &p, part);
        if (m.field == 3) sft__read_normalizer(t, &p, part);
    }
    sft_unmap(data, n);
    if (p.type != 2) sft__bad(t, "is a SentencePiece model of another type than BPE, which is not supported");
    int32_t *special[] = {&t->unk, &t->bos, &t->eos}, pieces = (int32_t)json_array_size(p.scores);
    for (int i = 0; i < 3; i++)
        if (*special[i] < 0 || *special[i] >= pieces) *special[i] = -1;
    json_t *root = json_loads(sft__around_pieces, 0, NULL);
    json_t *before = json_object_get(json_object_get(root, "normalizer"), "normalizers");
    json_t *behind = json_object_get(json_object_get(root, "decoder"), "decoders");
    if (!p.prefix) json_array_remove(before, 2), json_array_remove(behind, 3);
    if (!p.squeeze) json_array_remove(before, 1), json_array_remove(before, 0);
    json_object_set_new(root, "model", json_pack("{s:o,s:o,s:b,s:b}", "vocab", p.vocab, "scores", p.scores,
                                                 "fuse_unk", true, "byte_fallback", p.bytes));
    json_object_set_new(root, "added_tokens", p.added);
    return root;
}

SftTokenizer *sft_tokenizer_load(const char *folder) {
    static const char *const files[][2] = {{"tokenizer.json", "tokenizer.json"}, {"vocab.json", "merges.txt"},
                                           {"encoder.json", "vocab.bpe"}, {"tokenizer.model", "tokenizer.model"}};
    char path[4096], other[4096];
    SftTokenizer *t = SFT_NEW(SftTokenizer, 1);
    t->unk = t->bos = t->eos = -1;
    t->scratch = SFT_NEW(Sft__Scratch, SFT__SCRATCHES);
    json_t *config = NULL, *model = NULL, *root;
    if (sft_exists(sft_path(path, folder, "tokenizer_config.json"))) config = sft_json_big(path);
    if (sft_exists(sft_path(path, folder, "config.json"))) model = sft_json_file(path);
    int kind = 0;
    for (; kind < SFT_COUNT(files); kind++)
        if (sft_exists(sft_path(path, folder, files[kind][0])) && sft_exists(sft_path(other, folder, files[kind][1])))
            break;
    if (kind == SFT_COUNT(files))
        sft_die(SFT_BAD_INPUT, "%s has no tokenizer: expected tokenizer.json, or vocab.json and merges.txt, or "
                               "encoder.json and vocab.bpe, or tokenizer.model", folder);
    t->file = sft_format("%s", path);
    if (kind == 0) root = sft_json_file(path);
    else root = kind == 3 ? sft__read_sentencepiece(t, config) : sft__read_gpt2(t, other, config);
    sft__load_json(t, root, config, kind != 0);
    t->bos = sft__special_id(t, config, model, "bos_token", t->bos);
    t->eos = sft__special_id(t, config, model, "eos_token", t->eos);
    if (t->prefix.n && t->bos < 0) t->bos = t->prefix.ids[0];
    bool add_bos = sft__truth(t, config, "add_bos_token", kind == 3);
    if (!t->prefix.n && t->bos >= 0 && add_bos) sft_ids_add(&t->prefix, t->bos);
    if (!t->suffix.n && t->eos >= 0 && sft__truth(t, config, "add_eos_token", false)) sft_ids_add(&t->suffix, t->eos);
    t->chat_template = sft__load_chat_template(t, config, folder);
    json_decref(root), json_decref(config), json_decref(model);
    return t;
}

void sft_tokenizer_free(SftTokenizer *t) {
    if (!t) return;
    for (int i = 0; i < SFT__SCRATCHES; i++) {
        Sft__Scratch *s = &t->scratch[i];
        for (int k = 0; k < SFT__STEPS; k++) free(s->step[k].p);
        pcre2_match_data_free(s->match), pcre2_match_context_free(s->context), pcre2_jit_stack_free(s->stack);
        free(s->utf8.p), free(s->normal[0].p), free(s->normal[1].p);
        free(s->cache), free(s->symbol), free(s->rank), free(s->heap);
    }
    for (int k = 0; k < 2; k++) {
        Sft__Words *w = k ? &t->words : &t->raw;
        free(t->added[k].node), free(w->text.p), free(w->at), free(w->length), free(w->slot);
    }
    for (int k = 0; k < 3; k++) {
        Sft__Pipeline *p = k == 0 ? &t->normalizer : k == 1 ? &t->pre_tokenizer : &t->decoder;
        for (int i = 0; i < p->n; i++) free(p->step[i].text), pcre2_code_free(p->step[i].regex);
    }
    pcre2_code_free(t->word_char);
    free(t->prefix.ids), free(t->suffix.ids), free(t->joined), free(t->flags);
    free(t->merge), free(t->filter);
    free(t->chat_template), free(t->file), free(t->scratch), free(t);
}

/* ================================================================================================================
   Chat templates
   ================================================================================================================
   A chat model sees one string in which marks say who speaks. Every family has its own marks, and a model that was
   trained with one set and is asked with another answers badly, so a template renders, byte for byte, what the family's
   own Jinja chat_template renders (test/golden/make_templates.py compares). In: messages. Out: token ids, each with a
   flag that says whether it is trained.

   One table describes every family. A conversation becomes pieces that are tokenised one by one: the text before an
   answer, the answer, its stop token, the separator behind it. So the mask is exact: no token spans a border. A single
   space before {assistant} belongs to the answer, because byte-level vocabularies spell it as part of the first word.

   Special tokens written in a message's text are recognised, as in Hugging Face's tokenizers (<think>, <tool_call>,
   ...), except the template's own marks: "<|im_end|>" inside a user's text stays the ten characters it is and cannot
   end the turn, where Hugging Face would take it for the mark. (Marks that are plain text, such as [INST], cannot be
   told apart.) The usual pitfall: BOS twice, once by the template and once by the tokenizer. Here it comes from one
   place. */
enum { // formats: one for each role, those around outputs of tools, and what ends a conversation
    SFT__T_SYSTEM, SFT__T_USER, SFT__T_ASSISTANT, SFT__T_TOOL, SFT__T_CALL, SFT__T_ROLES,
    SFT__T_TOOLS_BEGIN = SFT__T_ROLES, SFT__T_TOOLS_BETWEEN, SFT__T_TOOLS_END, SFT__T_TAIL, SFT__T_FORMATS
};
static const char *const sft__roles[] = {"system", "user", "assistant", "tool", "function_call"};
static const char *const sft__places[] = {"{system}", "{user}", "{assistant}", "{tool}", "{assistant}"};
enum {
    SFT__T_FUSE = 1,           // the system text stands inside the first user message
    SFT__T_FUSE_LAST = 2,      // ... inside the last one
    SFT__T_TRIM = 4,           // white space around every content is cut off, as Jinja's trim does
    SFT__T_TRIM_ALL = 8,       // ... after the system text has been fused in
    SFT__T_ALTERNATE = 16,     // user, assistant, user, ...: anything else is refused, as the family's template does
    SFT__T_BOS_EACH = 32,      // every user message begins with BOS (Llama 2: a conversation is a list of closed texts)
    SFT__T_SYSTEM_UP = 64,     // all system messages are joined at the front
    SFT__T_TOOL_ANSWERS = 128, // the answer after a tool's output has no heading of its own
    SFT__T_THINK = 256,        // Qwen3: the last answer begins with <think>...</think>, empty if the content has none
};
/* A row: name; marks that tell its Jinja text from the ones below it; flags; the stop token (NULL: the tokenizer's
   eos); the system text of a conversation that brings none; formats. {stop} is the stop token. No format for tools:
   their output is a user message. The dates of Llama 3.1 are those its template falls back on. Mistral 0.3's own
   template loses the system text once the last question is answered; here it stays where it stood. */
typedef struct {
    const char *name, *mark[3];
    int flags;
    const char *stop, *standard, *format[SFT__T_FORMATS];
} Sft__Row;
// clang-format off
#define SFT__IM "<|im_start|>system\n{system}<|im_end|>\n", "<|im_start|>user\n{user}<|im_end|>\n", "<|im_start|>assistant\n{assistant}{stop}\n"
#define SFT__IM_TOOL "<|im_start|>tool\n{tool}<|im_end|>\n"
#define SFT__QWEN "\n<tool_response>\n{tool}\n</tool_response>", "<tool_call>\n{assistant}\n</tool_call>", "<|im_start|>user", "", "<|im_end|>\n"
#define SFT__HEAD(role) "<|start_header_id|>" role "<|end_header_id|>\n\n"
static const Sft__Row sft__rows[] = {
    {"qwen3", {"<|im_start|>", "<tool_call>", "reasoning_content"}, SFT__T_THINK, "<|im_end|>", NULL, {SFT__IM, SFT__QWEN}},
    {"qwen", {"<|im_start|>", "<tool_call>"}, 0, "<|im_end|>",
     "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.", {SFT__IM, SFT__QWEN}},
    {"smollm2", {"<|im_start|>", "named SmolLM, trained by Hugging Face"}, 0, "<|im_end|>",
     "You are a helpful AI assistant named SmolLM, trained by Hugging Face", {SFT__IM, SFT__IM_TOOL}},
    {"internlm2", {"<|im_start|>", "bos_token"}, 0, "<|im_end|>", NULL, {SFT__IM, SFT__IM_TOOL}},
    {"chatml", {"<|im_start|>"}, 0, "<|im_end|>", NULL, {SFT__IM, SFT__IM_TOOL}},
    {"llama3.1", {"<|start_header_id|>", "Cutting Knowledge Date"}, SFT__T_TRIM, "<|eot_id|>", "",
     {SFT__HEAD("system") "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n{system}<|eot_id|>", SFT__HEAD("user") "{user}<|eot_id|>",
      SFT__HEAD("assistant") "{assistant}{stop}", SFT__HEAD("ipython") "{tool}<|eot_id|>"}},
    {"llama3", {"<|start_header_id|>"}, SFT__T_TRIM, "<|eot_id|>", NULL,
     {SFT__HEAD("system") "{system}<|eot_id|>", SFT__HEAD("user") "{user}<|eot_id|>", SFT__HEAD("assistant") "{assistant}{stop}", SFT__HEAD("tool") "{tool}<|eot_id|>"}},
    {"llama2", {"[INST]", "<<SYS>>"}, SFT__T_FUSE | SFT__T_TRIM_ALL | SFT__T_ALTERNATE | SFT__T_BOS_EACH, NULL, NULL,
     {"<<SYS>>\n{system}\n<</SYS>>\n\n", "[INST] {user} [/INST]", " {assistant} {stop}"}},
    {"mistral", {"\" [INST] \""}, SFT__T_FUSE | SFT__T_ALTERNATE, NULL, NULL, {"{system}\n\n", " [INST] {user} [/INST]", " {assistant}{stop}"}},
    {"mistral-v0.3", {"\"[INST] \"", "\"[/INST]\""}, SFT__T_FUSE_LAST | SFT__T_ALTERNATE, NULL, NULL, {"{system}\n\n", "[INST] {user}[/INST]", " {assistant}{stop}"}},
    {"mistral-v0.1", {"'[INST] '", "' [/INST]'", "eos_token + ' '"}, SFT__T_FUSE | SFT__T_ALTERNATE, NULL, NULL, {"{system}\n\n", "[INST] {user} [/INST]", "{assistant}{stop} "}},
    {"mistral-v0.2", {"'[INST] '", "' [/INST]'"}, SFT__T_FUSE | SFT__T_ALTERNATE, NULL, NULL, {"{system}\n\n", "[INST] {user} [/INST]", "{assistant}{stop}"}},
    {"gemma", {"<start_of_turn>"}, SFT__T_FUSE | SFT__T_TRIM | SFT__T_ALTERNATE, "<end_of_turn>", NULL,
     {"{system}\n\n", "<start_of_turn>user\n{user}<end_of_turn>\n", "<start_of_turn>model\n{assistant}{stop}\n"}},
    {"phi3", {"<|end|>", "<|assistant|>"}, 0, "<|end|>", NULL,
     {"<|system|>\n{system}<|end|>\n", "<|user|>\n{user}<|end|>\n", "<|assistant|>\n{assistant}{stop}\n", [SFT__T_TAIL] = "{eos}"}},
    {"zephyr", {"<|user|>", "<|assistant|>", "eos_token"}, 0, NULL, NULL,
     {"<|system|>\n{system}{stop}\n", "<|user|>\n{user}{stop}\n", "<|assistant|>\n{assistant}{stop}\n"}},
    {"deepseek", {"<｜User｜>", "<｜Assistant｜>"}, SFT__T_SYSTEM_UP | SFT__T_TOOL_ANSWERS, "<｜end▁of▁sentence｜>", NULL,
     {"{system}", "<｜User｜>{user}", "<｜Assistant｜>{assistant}{stop}", "<｜tool▁output▁begin｜>{tool}<｜tool▁output▁end｜>", NULL,
      "<｜tool▁outputs▁begin｜>", "\n", "<｜tool▁outputs▁end｜>"}},
    {"deepseek-v2", {"'User: '", "'Assistant: '", "eos_token"}, 0, NULL, NULL, {"{system}\n\n", "User: {user}\n\n", "Assistant: {assistant}{stop}"}},
    {"vicuna", {"USER: ", "ASSISTANT:"}, 0, NULL,
     "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, detailed, and polite answers to the user's questions.",
     {"{system} ", "USER: {user} ", "ASSISTANT: {assistant}{stop}"}},
    {"alpaca", {"Below is an instruction", "### Instruction:", "### Response:"}, 0, NULL,
     "Below is an instruction that describes a task. Write a response that appropriately completes the request.",
     {"{system}\n\n", "### Instruction:\n{user}\n\n", "### Response:\n{assistant}{stop}\n\n"}},
    {"default", {NULL}, 0, NULL, NULL, {"{system}\n\n", "### Instruction:\n{user}\n\n", "### Response:\n{assistant}{stop}\n\n"}},
};
// clang-format on

struct SftTemplate {
    const SftTokenizer *t;
    char *name, *standard, *jinja;
    char *before[SFT__T_FORMATS], *after[SFT__T_FORMATS]; // formats, cut at their place; an answer's: trained text
    char *head, *separator;       // untrained text before an answer, behind its stop token
    bool tools, marks_begin[256]; // there is a format for tools' output; bytes that marks begin with
    int flags, nstops, nmarks;
    int32_t stop[16];    // the first is the one that is written
    int32_t *mark;       // special tokens of the formats: not recognised in a message's text
};

// Names of the rows whose stop token the vocabulary has; of all rows with t == NULL.
static char *sft__row_names(const SftTokenizer *t) {
    Sft__Bytes b = {0};
    for (int i = 0; i < SFT_COUNT(sft__rows); i++) {
        const char *stop = sft__rows[i].stop;
        if (t && (stop ? sft_token_id(t, stop) : sft_eos(t)) < 0) continue;
        sft__adds(&b, b.n ? ", " : ""), sft__adds(&b, sft__rows[i].name);
    }
    sft__add(&b, "", 1);
    return b.p;
}

static void sft__add_stop(SftTemplate *p, const char *stop) { // NULL: the tokenizer's eos
    int32_t id = stop ? sft_token_id(p->t, stop) : sft_eos(p->t);
    if (id < 0)
        sft_die(SFT_BAD_INPUT, "template %s ends an answer with %s, which is not one token of this vocabulary; "
                               "templates that fit: %s", p->name, stop ? stop : "the tokenizer's eos_token",
                sft__row_names(p->t));
    for (int i = 0; i < p->nstops; i++)
        if (p->stop[i] == id) return;
    if (p->nstops < SFT_COUNT(p->stop)) p->stop[p->nstops++] = id;
}

// Format f: filled in and cut at its place.
static void sft__set_format(SftTemplate *p, int f, const char *format) {
    const char *stop = sft_token_text(p->t, p->stop[0]);
    const char *eos = sft_eos(p->t) < 0 ? "" : sft_token_text(p->t, sft_eos(p->t));
    const char *place = f < SFT__T_ROLES ? sft__places[f] : NULL;
    Sft__Bytes side[2] = {{0}};
    int at = 0;
    for (const char *s = format; *s;) {
        const char *value = !strncmp(s, "{stop}", 6) ? stop : !strncmp(s, "{eos}", 5) ? eos : NULL;
        if (place && !strncmp(s, place, strlen(place))) {
            if (at++) sft_die(SFT_BAD_INPUT, "template: %s stands twice in \"%s\"", place, format);
            s += strlen(place);
        } else if (value) {
            sft__adds(&side[at], value), s = strchr(s, '}') + 1;
        } else {
            sft__add(&side[at], s++, 1);
        }
    }
    if (place && !at) sft_die(SFT_BAD_INPUT, "template: %s is missing in \"%s\"", place, format);
    sft__add(&side[0], "", 1), sft__add(&side[1], "", 1);
    p->before[f] = side[0].p, p->after[f] = side[1].p;
}

static void sft__encode_text(const SftTokenizer *t, SftIds *out, const char *s) {
    sft_encode(t, out, s, strlen(s), false);
}

// Special tokens among the ids of the formats, stop tokens, BOS and eos.
static void sft__find_marks(SftTemplate *p) {
    SftIds ids = {0};
    for (int i = 0; i < p->nstops; i++) sft_ids_add(&ids, p->stop[i]);
    sft_ids_add(&ids, sft_bos(p->t)), sft_ids_add(&ids, sft_eos(p->t));
    sft__encode_text(p->t, &ids, p->head), sft__encode_text(p->t, &ids, p->separator);
    for (int f = 0; f < SFT__T_FORMATS; f++)
        sft__encode_text(p->t, &ids, p->before[f]), sft__encode_text(p->t, &ids, p->after[f]);
    p->mark = SFT_NEW(int32_t, ids.n);
    for (int64_t i = 0; i < ids.n; i++) {
        int32_t id = ids.ids[i];
        bool mark = id >= 0 && p->t->flags[id] & SFT__SPECIAL;
        for (int j = 0; j < p->nmarks; j++) mark = mark && p->mark[j] != id;
        if (mark) p->mark[p->nmarks++] = id, p->marks_begin[(uint8_t)*sft_token_text(p->t, id)] = true;
    }
    free(ids.ids);
}

static SftTemplate *sft__template_of(const SftTokenizer *t, const Sft__Row *row) {
    SftTemplate *p = SFT_NEW(SftTemplate, 1);
    p->t = t, p->name = strdup(row->name), p->flags = row->flags, p->tools = row->format[SFT__T_TOOL] != NULL;
    p->standard = row->standard ? strdup(row->standard) : NULL;
    sft__add_stop(p, row->stop);
    for (int f = 0; f < SFT__T_FORMATS; f++) {
        const char *none = f < SFT__T_ROLES ? sft__places[f] : "";
        sft__set_format(p, f, row->format[f] ? row->format[f] : none);
    }
    char *head = p->head = p->before[SFT__T_ASSISTANT]; // untrained but for one last space
    size_t n = strlen(head);
    bool space = n && head[n - 1] == ' ' && (n == 1 || head[n - 2] != ' ');
    head[n - space] = 0;
    p->before[SFT__T_ASSISTANT] = strdup(space ? " " : "");
    const char *stop = sft_token_text(t, p->stop[0]);
    char *end = strstr(p->after[SFT__T_ASSISTANT], stop); // where it is not written it stands right behind the text
    p->separator = strdup(end ? end + strlen(stop) : "");
    if (end) *end = 0;
    if (sft_eos(t) >= 0) sft__add_stop(p, NULL);
    sft__find_marks(p);
    return p;
}

// The template of a JSON object: texts with {system}, {user}, {assistant}, {tool}; "stop": a token or a list of them.
static SftTemplate *sft__plain_template(const SftTokenizer *t, json_t *plain) {
    Sft__Row row = {.name = "plain", .format = {"{system}\n\n"}};
    const char *key;
    json_t *value, *stops = json_object_get(plain, "stop"), *user = json_object_get(plain, "user");
    json_object_foreach(plain, key, value) {
        int f = 0;
        while (f < SFT__T_CALL && strcmp(key, sft__roles[f])) f++;
        if (!strcmp(key, "stop")) continue;
        if (!json_is_string(value)) sft_die(SFT_BAD_INPUT, "template: \"%s\" is not a string", key);
        if (!strcmp(key, "default_system")) row.standard = json_string_value(value);
        else if (f < SFT__T_CALL) row.format[f] = json_string_value(value);
        else
            sft_die(SFT_BAD_INPUT, "template: unknown key \"%s\"; known: system, user, assistant, tool, "
                                   "default_system, stop", key);
    }
    if (!user) sft_die(SFT_BAD_INPUT, "template: \"user\" is missing, a text with {user} in it");
    json_t *first = json_is_array(stops) ? json_array_get(stops, 0) : stops;
    if (stops && !json_is_string(first))
        sft_die(SFT_BAD_INPUT, "template: \"stop\" is not a token or a list of tokens");
    row.stop = json_string_value(first);
    SftTemplate *p = sft__template_of(t, &row);
    for (size_t i = 1; i < json_array_size(stops); i++) {
        const char *stop = json_string_value(json_array_get(stops, i));
        if (!stop) sft_die(SFT_BAD_INPUT, "template: \"stop\" is not a token or a list of tokens");
        sft__add_stop(p, stop);
    }
    return p;
}

// Rendering
static void sft__trim_text(const char **s, size_t *n) {
    size_t left = sft__white_left(*s, *n);
    *s += left, *n -= left;
    *n -= sft__white_right(*s, *n);
}

// Appends a message's text. Inside the template's own marks tokenisation is cut, behind the first character: a byte
// that UTF-8 never has stands there.
#define SFT__CUT "\xff"
static void sft__add_content(const SftTemplate *p, Sft__Bytes *b, const char *s, size_t n) {
    for (size_t i = 0, from = 0; i <= n; i++) {
        bool cut = false;
        for (int k = 0; i < n && p->marks_begin[(unsigned char)s[i]] && k < p->nmarks && !cut; k++) {
            const char *mark = sft_token_text(p->t, p->mark[k]);
            cut = strlen(mark) > 1 && !strncmp(s + i, mark, SFT_MIN(strlen(mark), n - i + 1));
        }
        if (!cut && i < n) continue;
        sft__add(b, s + from, i + cut - from), from = i + cut;
        if (cut) sft__adds(b, SFT__CUT);
    }
}

static void sft__push_token(SftTokens *out, int32_t id, bool trained) {
    if (out->n == out->cap) {
        out->cap = out->cap * 2 + 64;
        out->ids = (int32_t *)sft_realloc(out->ids, (size_t)out->cap * sizeof *out->ids);
        out->trained = (uint8_t *)sft_realloc(out->trained, (size_t)out->cap);
    }
    out->ids[out->n] = id, out->trained[out->n++] = trained;
}

// What is being rendered: tokens, and text that waits to be tokenised, trained or not.
typedef struct { const SftTemplate *p; SftTokens *out; Sft__Bytes text; bool trained; } Sft__Pen;

// Tokenises the text that waits. As in the whole, it goes on from the text before it, or stands behind a mark, which
// may take white space off it.
static void sft__flush(Sft__Pen *pen) {
    const SftTemplate *p = pen->p;
    SftIds ids = {0};
    for (size_t from = 0, n; from < pen->text.n; from += n + 1) {
        const char *s = pen->text.p + from, *cut = memchr(s, SFT__CUT[0], pen->text.n - from);
        n = cut ? (size_t)(cut - s) : pen->text.n - from;
        int32_t last = pen->out->n ? pen->out->ids[pen->out->n - 1] : -1;
        Sft__Place place = last < 0 ? SFT__BEGINS : SFT__GOES_ON;
        for (int i = 0; i < p->nmarks; i++)
            if (p->mark[i] == last) place = SFT__BEHIND;
        size_t white = place == SFT__BEHIND && p->t->flags[last] & SFT__RSTRIP ? sft__white_left(s, n) : 0;
        ids.n = 0;
        sft__encode(p->t, &ids, s + white, n - white, place);
        for (int64_t i = 0; i < ids.n; i++) sft__push_token(pen->out, ids.ids[i], pen->trained);
    }
    free(ids.ids);
    pen->text.n = 0;
}

static void sft__pen_write(Sft__Pen *pen, const char *s, size_t n, bool trained) {
    if (n && trained != pen->trained) sft__flush(pen), pen->trained = trained;
    sft__add(&pen->text, s, n);
}
static void sft__pen_text(Sft__Pen *pen, const char *s, bool trained) { sft__pen_write(pen, s, strlen(s), trained); }

static int sft__role(const SftMessage *m) {
    if (!strcmp(m->role, "observation")) return SFT__T_TOOL;
    for (int r = 0; r < SFT__T_ROLES; r++)
        if (!strcmp(m->role, sft__roles[r])) return r;
    return -1;
}
static bool sft__answers(int role) { return role == SFT__T_ASSISTANT || role == SFT__T_CALL; }

static char *sft__check_roles(const SftTemplate *p, const SftMessage *m, int n) {
    int turn = 0;
    for (int i = 0; i < n; i++) {
        int r = sft__role(&m[i]);
        if (r < 0)
            return sft_format("message %d: unknown role \"%s\"; expected system, user, assistant, tool, observation or "
                              "function_call", i + 1, m[i].role);
        if (r == SFT__T_SYSTEM && i > 0 && p->flags & (SFT__T_FUSE | SFT__T_FUSE_LAST))
            return sft_format("message %d: template %s takes a system message in the first place only", i + 1, p->name);
        if (r != SFT__T_SYSTEM && p->flags & SFT__T_ALTERNATE && sft__answers(r) != (turn++ % 2 == 1))
            return sft_format("message %d: template %s wants user and assistant in turn, this one is by %s", i + 1,
                              p->name, m[i].role);
    }
    return n ? NULL : sft_format("a conversation without messages");
}

/* Qwen3: cuts the reasoning off a content ("<think>...</think>answer") and puts it back, empty if there was none, where
   the family's template does: in answers after the last user message, the last of all or those that reason. */
static void sft__add_thought(const SftTemplate *p, Sft__Bytes *b, const char *s, size_t n, bool after_user, bool last) {
    const char *thought = s, *end = s, *at, *stop = s + n;
    if ((at = strstr(s, "</think>")) != NULL) {
        for (end = at; at; at = strstr(s, "</think>")) s = at + 8;
        while (*s == '\n') s++;
        while ((at = strstr(thought, "<think>")) != NULL && at < end) thought = at + 7;
        while (thought < end && *thought == '\n') thought++;
        while (thought < end && end[-1] == '\n') end--;
    }
    if (after_user && (last || thought < end)) {
        sft__adds(b, "<think>\n"), sft__add_content(p, b, thought, (size_t)(end - thought));
        sft__adds(b, "\n</think>\n\n");
        while (*s == '\n') s++;
    }
    sft__add_content(p, b, s, (size_t)(stop - s));
}

static int sft__last_query(const SftMessage *m, int n) { // the last user message that is no tool's output in disguise
    for (int i = n - 1; i >= 0; i--) {
        const char *s = m[i].content, *begin = "<tool_response>", *end = "</tool_response>";
        size_t n1 = strlen(begin), n2 = strlen(end);
        bool wrapped = m[i].bytes >= n1 + n2 && !strncmp(s, begin, n1) && !strcmp(s + m[i].bytes - n2, end);
        if (sft__role(&m[i]) == SFT__T_USER && !wrapped) return i;
    }
    return n - 1;
}

/* First every message's text, ready to be put between its marks: trimmed, reasoning in its place, the system text moved
   to where the family wants it. A message that has gone elsewhere is left with role -1. */
typedef struct { int role; bool trained; Sft__Bytes text; } Sft__Turn;
static void sft__prepare(const SftTemplate *p, Sft__Turn *turn, const SftMessage *m, int n) {
    int query = p->flags & SFT__T_THINK ? sft__last_query(m, n) : 0, first = -1; // the system message that others join
    for (int i = 0; i < n; i++) {
        Sft__Turn *u = &turn[i];
        Sft__Bytes valid = {0};
        size_t bytes = m[i].bytes;
        const char *s = sft__utf8(&valid, m[i].content, &bytes);
        if (s == valid.p) sft__add(&valid, "", 1), s = valid.p;
        u->role = sft__role(&m[i]), u->trained = m[i].weight != 0;
        bool answer = sft__answers(u->role);
        bool fused = u->role == SFT__T_SYSTEM && p->flags & (SFT__T_FUSE | SFT__T_FUSE_LAST);
        if ((p->flags & SFT__T_TRIM && !fused) || (p->flags & SFT__T_TRIM_ALL && answer)) sft__trim_text(&s, &bytes);
        if (p->flags & SFT__T_THINK && answer) sft__add_thought(p, &u->text, s, bytes, i > query, i + 1 == n);
        else sft__add_content(p, &u->text, s, bytes);
        free(valid.p);
        if (u->role != SFT__T_SYSTEM || !(p->flags & SFT__T_SYSTEM_UP)) continue;
        if (first < 0) first = i;
        else sft__adds(&turn[first].text, "\n\n"), sft__add(&turn[first].text, u->text.p, u->text.n), u->role = -1;
    }
    for (; first > 0; first--) { // up to the front
        Sft__Turn up = turn[first];
        turn[first] = turn[first - 1], turn[first - 1] = up;
    }
    int at = -1; // the user message that takes the system text in
    for (int i = 0; i < n; i++)
        if (turn[i].role == SFT__T_USER && (at < 0 || p->flags & SFT__T_FUSE_LAST)) at = i;
    if (p->flags & (SFT__T_FUSE | SFT__T_FUSE_LAST) && at > 0 && turn[0].role == SFT__T_SYSTEM) {
        Sft__Bytes all = {0};
        sft__adds(&all, p->before[SFT__T_SYSTEM]), sft__add(&all, turn[0].text.p, turn[0].text.n);
        sft__adds(&all, p->after[SFT__T_SYSTEM]), sft__add(&all, turn[at].text.p, turn[at].text.n);
        free(turn[at].text.p);
        turn[at].text = all, turn[0].role = -1;
    }
}

char *sft_render(const SftTemplate *p, SftTokens *out, const SftMessage *messages, int n, bool generation) {
    char *error = sft__check_roles(p, messages, n);
    if (error) return error;
    int role = sft__role(&messages[0]), before = -1, standard = p->standard && role != SFT__T_SYSTEM;
    bool bos = sft_adds_bos(p->t) && sft_bos(p->t) >= 0, headless = false;
    SftMessage *m = SFT_NEW(SftMessage, n + 1);
    Sft__Turn *turn = SFT_NEW(Sft__Turn, n + 1);
    Sft__Pen pen = {p, out, {0}, false};
    if (standard) // said with the prompt that it stands before
        m[0] = (SftMessage){"system", p->standard, strlen(p->standard), sft__answers(role) ? 0 : messages[0].weight};
    memcpy(m + standard, messages, (size_t)n * sizeof *m);
    n += standard;
    sft__prepare(p, turn, m, n);
    if (bos && !(p->flags & SFT__T_BOS_EACH)) sft__push_token(out, sft_bos(p->t), false);
    for (int i = 0; i < n; i++) {
        Sft__Turn *u = &turn[i];
        role = u->role == SFT__T_TOOL && !p->tools ? SFT__T_USER : u->role;
        if (role < 0) continue;
        bool last_tool = role == SFT__T_TOOL && (i + 1 == n || turn[i + 1].role != SFT__T_TOOL);
        if (sft__answers(role)) {
            sft__pen_text(&pen, headless ? "" : p->head, pen.trained); // a heading goes with the prompt before it
            sft__flush(&pen);
            sft__pen_text(&pen, p->before[SFT__T_ASSISTANT], u->trained);
        } else if (role == SFT__T_USER && bos && p->flags & SFT__T_BOS_EACH) {
            sft__flush(&pen), sft__push_token(out, sft_bos(p->t), false);
        } else if (role == SFT__T_TOOL) {
            sft__pen_text(&pen, p->before[before == role ? SFT__T_TOOLS_BETWEEN : SFT__T_TOOLS_BEGIN], u->trained);
        }
        if (role != SFT__T_ASSISTANT) sft__pen_text(&pen, p->before[role], u->trained);
        const char *s = u->text.p;
        size_t bytes = u->text.n;
        if (p->flags & SFT__T_TRIM_ALL) sft__trim_text(&s, &bytes);
        sft__pen_write(&pen, s, bytes, u->trained);
        sft__pen_text(&pen, p->after[role], u->trained);
        if (last_tool) sft__pen_text(&pen, p->before[SFT__T_TOOLS_END], u->trained);
        if (role == SFT__T_CALL) sft__pen_text(&pen, p->after[SFT__T_ASSISTANT], u->trained);
        if (sft__answers(role)) {
            sft__flush(&pen), sft__push_token(out, p->stop[0], u->trained);
            pen.trained = false, sft__pen_text(&pen, p->separator, false), sft__flush(&pen);
        }
        before = role, headless = p->flags & SFT__T_TOOL_ANSWERS && role == SFT__T_TOOL;
    }
    sft__pen_text(&pen, !generation ? p->before[SFT__T_TAIL] : headless ? "" : p->head, false);
    sft__flush(&pen);
    for (int i = 0; i < n; i++) free(turn[i].text.p);
    free(turn), free(m), free(pen.text.p);
    return NULL;
}

/* The same as Jinja, for the exported folder: the formats as variables, then one text that reads them. It opens with a
   comment that says how it was made, so that a folder written by this program is recognised when it is read again. */
// clang-format off
static const char sft__program[] =
    "{% set ns = namespace(system='') %}{% if bos and not bos_each %}{{ bos_token }}{% endif %}"
    "{% if standard is not none and messages[0]['role'] != 'system' %}{{ system[0] + standard + system[1] }}{% endif %}"
    "{% if system_up %}{% for m in messages if m['role'] == 'system' %}{{ ('' if loop.first else '\\n\\n') + m['content'] }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% set text = (m['content'] | trim) if trim else m['content'] %}"
    "{% set before = messages[loop.index0 - 1]['role'] if not loop.first else '' %}"
    "{% set next = messages[loop.index0 + 1]['role'] if not loop.last else '' %}"
    "{% if m['role'] == 'system' %}{% if fuse or fuse_last %}{% set ns.system = system[0] + m['content'] + system[1] %}"
    "{% elif not system_up %}{{ system[0] + text + system[1] }}{% endif %}"
    "{% elif m['role'] in ['assistant', 'function_call'] %}"
    "{% if think and '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% else %}{% set thought = '' %}{% endif %}"
    "{% if think and loop.last %}{{ head + '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% set text = text.lstrip('\\n') %}"
    "{% elif not (tool_answers and before == 'tool') %}{{ head }}{% endif %}{% if trim_all %}{% set text = text | trim %}{% endif %}"
    "{{ assistant[0] + ((function_call[0] + text + function_call[1]) if m['role'] == 'function_call' else text) + assistant[1] + end }}"
    "{% elif tools and m['role'] == 'tool' %}"
    "{{ (tools_between if before == 'tool' else tools_begin) + tool[0] + text + tool[1] + ('' if next == 'tool' else tools_end) }}"
    "{% else %}{% if bos and bos_each %}{{ bos_token }}{% endif %}"
    "{% if not fuse_last or 'user' not in (messages[loop.index:] | map(attribute='role') | list) %}"
    "{% set text = ns.system + text %}{% set ns.system = '' %}{% endif %}"
    "{{ user[0] + ((text | trim) if trim_all else text) + user[1] }}{% endif %}{% endfor %}"
    "{{ head if add_generation_prompt else tail }}";
// clang-format on

static char *sft__jinja(const SftTemplate *p, json_t *plain) {
    static const char *flags[] = {"fuse", "fuse_last", "trim", "trim_all", "alternate",
                                  "bos_each", "system_up", "tool_answers", "think"};
    static const char *more[] = {"tools_begin", "tools_between", "tools_end", "tail"};
    json_t *made_by = plain ? json_incref(plain) : json_string(p->name), *v = json_object(), *value;
    char *made = json_dumps(made_by, JSON_ENCODE_ANY | JSON_ENSURE_ASCII | JSON_COMPACT);
    for (char *close; (close = strstr(made, "#}")) != NULL;) { // a Jinja comment ends there
        char *safe = sft_format("%.*s\\u0023%s", (int)(close - made), made, close + 1);
        free(made), made = safe;
    }
    for (int i = 0; i < SFT_COUNT(flags); i++) json_object_set_new(v, flags[i], json_boolean(p->flags >> i & 1));
    for (int f = 0; f < SFT__T_FORMATS; f++)
        if (f < SFT__T_ROLES) json_object_set_new(v, sft__roles[f], json_pack("[ss]", p->before[f], p->after[f]));
        else json_object_set_new(v, more[f - SFT__T_ROLES], json_string(p->before[f]));
    char *end = sft_format("%s%s", sft_token_text(p->t, p->stop[0]), p->separator);
    json_object_set_new(v, "head", json_string(p->head)), json_object_set_new(v, "end", json_string(end));
    json_object_set_new(v, "bos", json_boolean(sft_adds_bos(p->t) && sft_bos(p->t) >= 0));
    json_object_set_new(v, "tools", json_boolean(p->tools));
    if (p->standard) json_object_set_new(v, "standard", json_string(p->standard));
    Sft__Bytes b = {0};
    sft__adds(&b, "{#- sft template "), sft__adds(&b, made);
    sft__adds(&b, p->standard ? " -#}" : " -#}{% set standard = none %}");
    const char *name;
    json_object_foreach(v, name, value) { // JSON's strings, lists and booleans are Jinja's
        char *text = json_dumps(value, JSON_ENCODE_ANY), *set = sft_format("{%% set %s = %s %%}", name, text);
        sft__adds(&b, set), free(set), free(text);
    }
    sft__add(&b, sft__program, sizeof sft__program);
    free(made), free(end), json_decref(made_by), json_decref(v);
    return b.p;
}

/* The system text that a ChatML chat_template brings along, NULL if none: literal text between the system mark and
   <|im_end|>, not "... + messages[0].content + ...". */
static char *sft__standard_of(const char *jinja) {
    static const char mark[] = "<|im_start|>system";
    for (const char *s = strstr(jinja, mark); s; s = strstr(s + 1, mark)) {
        const char *text = s + strlen(mark), *end = strstr(text, "<|im_end|>");
        text += *text == '\n' ? 1 : !strncmp(text, "\\n", 2) ? 2 : 0;
        if (text == s + strlen(mark) || !end || strcspn(text, "{}+") < (size_t)(end - text)) continue;
        Sft__Bytes b = {0};
        for (; text < end; text++)
            if (*text == '\\') text++, sft__add(&b, *text == 'n' ? "\n" : text, 1);
            else sft__add(&b, text, 1);
        sft__add(&b, "", 1);
        return b.p;
    }
    return NULL;
}

// By name, or by the marks in the Jinja text.
static const Sft__Row *sft__find_row(const char *name, const char *jinja) {
    for (int i = 0; i < SFT_COUNT(sft__rows); i++) {
        const Sft__Row *row = &sft__rows[i];
        size_t n = strlen(row->name);
        bool named = name && !strncmp(name, row->name, n);
        if (named && (!name[n] || !strcmp(name + n, "_chat"))) return row; // XTuner: qwen_chat
        bool all = jinja && row->mark[0];
        for (int k = 0; k < 3 && all && row->mark[k]; k++) all = strstr(jinja, row->mark[k]) != NULL;
        if (all) return row;
    }
    return NULL;
}

SftTemplate *sft_template(const SftTokenizer *t, const char *name, json_t *plain) {
    const char *own = sft_chat_template(t), *made = own && !strncmp(own, "{#- sft template ", 17) ? own + 17 : NULL;
    json_t *comment = made ? json_loads(made, JSON_DISABLE_EOF_CHECK | JSON_DECODE_ANY, NULL) : NULL; // by this program
    const Sft__Row *recognised = comment ? sft__find_row(json_string_value(comment), NULL) : sft__find_row(NULL, own);
    const Sft__Row *row = name ? sft__find_row(name, NULL) : recognised;
    bool asked = name || plain;
    if (!asked && json_is_object(comment)) plain = comment;
    if (!plain && !row && (name || own))
        sft_die(SFT_BAD_INPUT, "template: %s%s; expected one of %s, or {\"system\", \"user\", \"assistant\", \"stop\"}",
                name ? "unknown name " : "the model's chat_template is none that is known here", name ? name : "",
                sft__row_names(NULL));
    if (!row && !plain) row = sft__find_row("default", NULL);
    SftTemplate *p = plain ? sft__plain_template(t, plain) : sft__template_of(t, row);
    bool same = own && (plain ? plain == comment : row == recognised); // then the model's own text stays
    bool chatml = same && row && !comment && !strncmp(row->format[0], "<|im_start|>", 12);
    if (chatml) { // with the system text it brings
        char *standard = sft__standard_of(own);
        same = !name || !strcmp(p->standard ? p->standard : "", standard ? standard : "");
        if (!name) free(p->standard), p->standard = standard;
        else free(standard);
    }
    p->jinja = same ? strdup(own) : sft__jinja(p, plain);
    if (!asked && !own)
        sft_note("the tokenizer has no chat_template: template default, an answer ends with %s",
                 sft_token_text(t, p->stop[0]));
    if (!asked && own)
        sft_note("template %s, recognised from the tokenizer's chat_template%s%s", p->name,
                 p->standard ? "; system text where none is given: " : "", p->standard ? p->standard : "");
    json_decref(comment);
    return p;
}

void sft_template_free(SftTemplate *p) {
    if (!p) return;
    for (int f = 0; f < SFT__T_FORMATS; f++) free(p->before[f]), free(p->after[f]);
    free(p->name), free(p->standard), free(p->jinja), free(p->head), free(p->separator), free(p->mark), free(p);
}

const char *sft_template_name(const SftTemplate *p) { return p->name; }
const char *sft_template_jinja(const SftTemplate *p) { return p->jinja; }
int sft_template_stops(const SftTemplate *p, const int32_t **ids) {
    *ids = p->stop;
    return p->nstops;
}
