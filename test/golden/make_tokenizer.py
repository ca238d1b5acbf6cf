"""Golden files for test_tokenizer.c, made with tokenizers 0.23.3 and sentencepiece 0.2.3.

    make_tokenizer.py REAL_TOKENIZERS SMOLLM2      folders; writes tokenizer/ beside this script

Real tokenizers are too large to keep. Each is reduced to the tokens that are part of some word of the corpus below:
then every merge that the corpus can see is there, in the same order, and the ids are the real ones, renumbered (checked).
What the real ones do not use is covered by small made-up tokenizers (synthetic.json).
"""
import io, json, os, shutil, struct, sys, random
from tokenizers import Tokenizer
import sentencepiece

HERE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "tokenizer")

CORPUS = ["", " ", "a", "Hello world", " Hello  world  ", "I'll can't WON'T we'RE they've I'd 'S '\u017f", "caf\u00e9 cafe\u0301 A\u030a \u212b \u2126 \ufb01 \u00bd \u2460",
    "\u1112\u1161\u11ab \ud55c\uad6d\uc5b4 \uac00\u11a8", "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e", "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35", "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "\u0645\u0631\u062d\u0628\u0627 \u0661\u0662\u0663", "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0401\u0416 \u0438\u0306", "\u0393\u03b5\u03b9\u03ac \u03c3\u03bf\u03c5", "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u4eca\u5929\u5929\u6c14\u5f88\u597d\u3002\u6211\u4eec\u53bb\u516c\u56ed\u5427",
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8 \u304b\u3099", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f", "\r\n\r\n \t\n\n x\r\ry", "a\tb\t\tc", "\x00\x01\x02 \x7f \x85 \xa0\u2003\u3000 \u200b\u200d\ufeff\u180e x",
    "   \n   \n  x", "1234567890 12 3.14 1,000,000 \u00b2\u00b3 \u2167 \u0663", "<|im_start|>user\nhi<|im_end|>", "<s>a</s> <unk> <s> [INST] x [/INST]", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>",
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>x<\uff5cend\u2581of\u2581sentence\uff5c> <\uff5cUser\uff5c>", "<think>\n</think>", "<|endoftext|>x<|endoftext|>", "\u2581\u2581 \u2581a\u2581", "<0x0A> <0x41>", "def f(x):\n    return x**2  # comment\n\n\n",
    "http://example.com/a?b=c&d=e#f", "!!!???...,,,;;;", "a" * 300, "ab" * 200, " " * 24, "\n" * 12, "\U00010348 \U00020000\U00020001", "e\u0301\u0323\u0302 \u0344 \u0958", "\u017f \u212a \u00df \u1e9e \u0130", "\ufffd\uffff",
    "don\u2019t \u201cquote\u201d \u2014dash\u2026 ", "x\u2028y\u2029z", "a\u0300\u0300\u0300b", "_under_score__ __init__", "\u01c5 \u02b0 \u00aa \u24b6", "\u0120x \u010a", "Supercalifragilisticexpialidocious" * 6, "\u7684" * 90,
    "The quick brown fox jumps over the lazy dog. \u654f\u6377\u7684\u68d5\u8272\u72d0\u72f8\u8df3\u8fc7\u4e86\u61d2\u72d7\u3002 \u0421\u044a\u0435\u0448\u044c \u0436\u0435 \u0435\u0449\u0451"]
BYTES = [b"\xff", b"a\xc3", b"a\xc3(b", b"\xe4\xbd", b"x\xe4\xbd\xa0\xbdy", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xf0\x9f\x98 \xf0\x9f\x98\x80", b"\xc0\x80\xf8\x88", b"\xf4\x90\x80\x80", b"ok \xe2\x82", b"\x80" * 20]

def write(path, text):
    os.makedirs(os.path.dirname(path), exist_ok=True)
    open(path, "w", encoding="utf-8").write(text)

def compact(x):
    return json.dumps(x, ensure_ascii=False, separators=(",", ":"))

def golden(folder, texts, encode, decode):
    """One line a text: its bytes in hex, its ids, and both decodings in hex ("=": the text itself, "-": none)."""
    lines = []
    for b in texts:
        text = b.decode("utf-8", "replace")
        ids = encode(text)
        row = [b.hex(), " ".join(map(str, ids))]
        for skip in (True, False):
            d = decode(ids, skip)
            row.append("-" if d is None else "=" if d == text else d.encode("utf-8", "replace").hex())
        lines.append("\t".join(row))
    write(os.path.join(folder, "cases.txt"), "\n".join(lines) + "\n")

def words_of(tok, text):
    """What the model may see as one word, added tokens taken out."""
    ids = tok.encode(text, add_special_tokens=False)
    out = []
    pieces = [text]
    for t in sorted((a.content for a in tok.get_added_tokens_decoder().values()), key=len, reverse=True):
        pieces = [q for p in pieces for q in p.split(t)]
    for p in pieces:
        if tok.normalizer: p = tok.normalizer.normalize_str(p)
        out += [w for w, _ in tok.pre_tokenizer.pre_tokenize_str(p)] if tok.pre_tokenizer and p else [p]
    return out

def keep_tokens(vocab, words):
    longest = max(map(len, vocab))
    keep = set()
    for w in words:
        for i in range(len(w)):
            for j in range(i + 1, min(len(w), i + longest) + 1):
                if w[i:j] in vocab: keep.add(w[i:j])
    return keep

def reduce(name, source):
    root = json.load(open(os.path.join(source, "tokenizer.json"), encoding="utf-8"))
    real = Tokenizer.from_file(os.path.join(source, "tokenizer.json"))
    model = root["model"]
    words = {w for b in TEXTS for w in words_of(real, b.decode("utf-8", "replace"))}
    keep = keep_tokens(model["vocab"], words)
    keep |= {t for t in model["vocab"] if len(t) == 1 and ord(t) < 0x144} | {t for t in model["vocab"] if len(t) == 6 and t.startswith("<0x")}
    used = {i for b in TEXTS for i in real.encode(b.decode("utf-8", "replace")).ids}
    added = [a for a in root["added_tokens"] if a["id"] in used or not a["special"]][:40]
    keep |= {a["content"] for a in added if a["content"] in model["vocab"]}
    if model.get("unk_token"): keep.add(model["unk_token"])
    old = sorted({model["vocab"][t] for t in keep} | {a["id"] for a in added})
    new = {o: n for n, o in enumerate(old)}
    pairs = [m.split(" ") if isinstance(m, str) else m for m in model["merges"]]
    kept = [m for m, (a, b) in zip(model["merges"], pairs) if a in keep and b in keep and a + b in keep]
    model["vocab"] = {t: new[i] for t, i in sorted(model["vocab"].items(), key=lambda p: p[1]) if t in keep}
    model["merges"] = kept
    root["added_tokens"] = [dict(a, id=new[a["id"]]) for a in added]
    if root["post_processor"] and root["post_processor"]["type"] == "TemplateProcessing":
        for s in root["post_processor"]["special_tokens"].values(): s["ids"] = [new[i] for i in s["ids"]]
    folder = os.path.join(HERE, name)
    write(os.path.join(folder, "tokenizer.json"), compact(root))
    small = Tokenizer.from_file(os.path.join(folder, "tokenizer.json"))
    for b in TEXTS:
        text = b.decode("utf-8", "replace")
        assert small.encode(text).ids == [new[i] for i in real.encode(text).ids], (name, text)
    golden(folder, TEXTS, lambda t: small.encode(t).ids, lambda i, skip: small.decode(i, skip_special_tokens=skip))
    print(name, len(old), "tokens", len(kept), "merges", os.path.getsize(os.path.join(folder, "tokenizer.json")), "bytes")

def reduce_gpt2(source):
    """encoder.json + vocab.bpe, without a tokenizer.json."""
    vocab = json.load(open(os.path.join(source, "encoder.json"), encoding="utf-8"))
    merges = [l for l in open(os.path.join(source, "vocab.bpe"), encoding="utf-8").read().split("\n")[1:] if l]
    def build(v, m):
        return Tokenizer.from_str(compact({"version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
            "added_tokens": [{"id": v["<|endoftext|>"], "content": "<|endoftext|>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}],
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": v, "merges": m}}))
    real = build(vocab, merges)
    keep = keep_tokens(vocab, {w for b in TEXTS for w in words_of(real, b.decode("utf-8", "replace"))}) | {t for t in vocab if len(t) == 1} | {"<|endoftext|>"}
    new = {o: n for n, o in enumerate(sorted(vocab[t] for t in keep))}
    v = {t: new[i] for t, i in vocab.items() if t in keep}
    m = [x for x in merges if x.split(" ")[0] in keep and x.split(" ")[1] in keep and x.replace(" ", "") in keep]
    write(os.path.join(HERE, "gpt2", "encoder.json"), compact(v))
    write(os.path.join(HERE, "gpt2", "vocab.bpe"), "#version: 0.2\n" + "\n".join(m) + "\n")
    small = build(v, m)
    for b in TEXTS:
        text = b.decode("utf-8", "replace")
        assert small.encode(text).ids == [new[i] for i in real.encode(text).ids]
    golden(os.path.join(HERE, "gpt2"), TEXTS, lambda t: small.encode(t).ids, lambda i, skip: small.decode(i, skip_special_tokens=skip))

def varint(n):
    out = b""
    while n > 127: out += bytes([n & 127 | 128]); n >>= 7
    return out + bytes([n])

def fields(data):
    """(number, wire type, payload) of a protocol buffer's fields."""
    at = 0
    def read():
        nonlocal at
        v = shift = 0
        while True:
            b = data[at]; at += 1
            v |= (b & 127) << shift; shift += 7
            if b < 128: return v
    while at < len(data):
        tag = read()
        n = {1: 8, 5: 4}.get(tag & 7)
        if tag & 7 == 0: yield tag >> 3, 0, read(); continue
        if n is None: n = read()
        yield tag >> 3, tag & 7, data[at:at + n]; at += n

def reduce_sentencepiece(source):
    data = open(os.path.join(source, "tokenizer.model"), "rb").read()
    real = sentencepiece.SentencePieceProcessor(model_proto=data)
    pieces = [dict((f, v) for f, _, v in fields(p)) for f, _, p in fields(data) if f == 1]
    special = {"<s>", "</s>", "<unk>"}
    texts = [b for b in TEXTS if not any(s.encode() in b for s in special)]  # the library does not look for them in text
    vocab = {p[1].decode(): i for i, p in enumerate(pieces)}
    keep = keep_tokens(vocab, {"\u2581" + b.decode("utf-8", "replace").replace(" ", "\u2581") for b in texts})
    keep |= {t for t in vocab if t.startswith("<0x") and len(t) == 6} | special
    old = [i for t, i in vocab.items() if t in keep]
    new = {o: n for n, o in enumerate(old)}
    out = b""
    for i in old:
        p = pieces[i]
        body = b"\x0a" + varint(len(p[1])) + p[1] + b"\x15" + p[2] + (b"\x18" + varint(p[3]) if 3 in p else b"")
        out += b"\x0a" + varint(len(body)) + body
    for f, w, v in fields(data):
        if f in (2, 3):
            # only the fields that change an encoding: model type, byte fallback, ids; all of the normalizer's
            keep_fields = b"".join(varint(n << 3 | wire) + (varint(x) if wire == 0 else varint(len(x)) + x if wire == 2 else x)
                                   for n, wire, x in fields(v) if f == 3 or n in (3, 35, 40, 41, 42, 43))
            out += varint(f << 3 | 2) + varint(len(keep_fields)) + keep_fields
    folder = os.path.join(HERE, "llama2_model")
    os.makedirs(folder, exist_ok=True)
    open(os.path.join(folder, "tokenizer.model"), "wb").write(out)
    small = sentencepiece.SentencePieceProcessor(model_proto=out)
    for b in texts:
        text = b.decode("utf-8", "replace")
        assert small.encode(text) == [new[i] for i in real.encode(text)], text
    golden(folder, texts, lambda t: [small.bos_id()] + small.encode(t), lambda i, skip: small.decode(i[1:]) if skip else None)

def train_sentencepiece():
    """One that takes extra spaces away, but only spaces, and has pieces that a user named."""
    folder = os.path.join(HERE, "sentencepiece")
    texts = [b for b in TEXTS if not any(x.encode() in b for x in ["<s>", "</s>", "<unk>", "\u2581\u2581"])]  # \u2581\u2581: decoding takes all of them away
    lines = [line for b in texts for line in b.decode("utf-8", "replace").replace("\0", "").split("\n") if len(line) < 200]
    os.makedirs(folder, exist_ok=True)
    model = io.BytesIO() # of a file it would write down the path
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines * 5), model_writer=model, vocab_size=500, hard_vocab_limit=False, model_type="bpe",
        normalization_rule_name="identity", remove_extra_whitespaces=True, byte_fallback=True, user_defined_symbols=["\n", "<x>"], num_threads=1, minloglevel=2)
    open(os.path.join(folder, "tokenizer.model"), "wb").write(model.getvalue())
    real = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    more = ["a\n b", "a \n  b \n", "  \n ", "<x> a<x>  <x>b", " \t  x ", "line\n\n   line  \n", "x \u2581"]
    golden(folder, texts + [t.encode() for t in more], lambda t: [real.bos_id()] + real.encode(t), lambda i, skip: real.decode(i[1:]) if skip else None)

# ---- made-up tokenizers ----------------------------------------------------------------------------------------------
def made_up():
    U = "\u2581"
    def tok(**k):
        vocab = k.pop("vocab", None) or {t: i for i, t in enumerate(["<unk>", "a", "b", "c", "d", " ", U, "1", "2", "-", ".", "ab", "abc", U + "a", U + "ab", U + U, "cd", "--", "12", "\u00e9", "e", "\n", "x", "y", "z"])}
        m = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
             "vocab": vocab, "merges": k.pop("merges", ["a b", "ab c", U + " a", U + "a b", U + " " + U, "c d", "- -", "1 2"])}
        for key in list(k):
            if key in m: m[key] = k.pop(key)
        d = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": k.pop("added", []), "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None, "model": m}
        d.update(k)
        return d
    def add(content, i, **k):
        return dict({"id": i, "content": content, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}, **k)
    split = lambda regex, behavior, invert=False: {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}
    seq = lambda key, *parts: {"type": "Sequence", key: list(parts)}
    texts = ["", "a", "abcd", "ab cd", " ab  cd ", "a-b--c---d", "--a", "a--", "1212 a12b1", "abc\u00e9e\u0301 e\u0301", U + "ab" + U, "a b c d a b", "zzaqbqqc", "a.b.c..", "\n a\n", "<m>ab<m> <m>  ab  <m>a", "x<w>y <w> z<w>.<w>-", "AB", "a\u00a0b\u2003c", "aaabbbccc", "q", "qq", "  ", " <m> ", "abab12--12abab", "\u0301a", "x \u00e9 y", "\U0001f600a\U0001f600", "_a_", "\u0665\u00bd12"]
    made = {}
    for b in ["Isolated", "Removed", "MergedWithPrevious", "MergedWithNext", "Contiguous"]:
        for inv in (False, True): made["split %s %s" % (b, inv)] = tok(pre_tokenizer=split("-|\\s", b, inv), unk_token="<unk>")
        made["split string " + b] = tok(pre_tokenizer={"type": "Split", "pattern": {"String": "--"}, "behavior": b, "invert": False}, unk_token="<unk>")
        made["punctuation " + b] = tok(pre_tokenizer={"type": "Punctuation", "behavior": b}, unk_token="<unk>")
    made["empty matches"] = tok(pre_tokenizer=split("b*", "Isolated"), unk_token="<unk>")
    made["empty matches previous"] = tok(pre_tokenizer=split("-*", "MergedWithPrevious"), unk_token="<unk>")
    for s in ["first", "always", "never"]:
        for sp in (True, False):
            meta = {"type": "Metaspace", "replacement": U, "prepend_scheme": s, "split": sp}
            made["metaspace %s %s" % (s, sp)] = tok(pre_tokenizer=meta, decoder=meta, unk_token="<unk>", added=[add("<m>", 30), add("<w>", 31, special=True)])
            made["metaspace normalized added %s %s" % (s, sp)] = tok(pre_tokenizer=meta, decoder=meta, unk_token="<unk>", added=[add("<m>", 30, normalized=True), add("<w>", 31, normalized=True, lstrip=True)])
    made["digits one"] = tok(pre_tokenizer={"type": "Digits", "individual_digits": True}, unk_token="<unk>")
    made["digits run"] = tok(pre_tokenizer={"type": "Digits", "individual_digits": False}, unk_token="<unk>")
    made["whitespace"] = tok(pre_tokenizer={"type": "Whitespace"}, unk_token="<unk>")
    made["whitespace split"] = tok(pre_tokenizer={"type": "WhitespaceSplit"}, unk_token="<unk>", fuse_unk=True)
    for k in ["lstrip", "rstrip", "single_word", "normalized"]:
        made["added " + k] = tok(unk_token="<unk>", added=[add("<m>", 30, **{k: True}), add("<w>", 31, single_word=True), add("b c", 32, **{k: True})])
        made["added, prepend, " + k] = tok(unk_token="<unk>", added=[add("<m>", 30, **{k: True}), add("<w>", 31, normalized=True), add("b c", 32, normalized=True, lstrip=True)],
            normalizer=seq("normalizers", {"type": "Prepend", "prepend": U}, {"type": "Replace", "pattern": {"String": " "}, "content": U}))
    made["added all strip"] = tok(unk_token="<unk>", added=[add("<m>", 30, lstrip=True, rstrip=True, special=True), add("<w>", 31, lstrip=True, rstrip=True, single_word=True), add(" a", 32)])
    made["added longest"] = tok(unk_token="<unk>", added=[add("<m>", 30), add("<m>a", 31), add("<m>ab<", 32), add("<", 33), add("  ", 34), add(" ", 5)])
    made["no unk"] = tok()
    made["fuse unk"] = tok(unk_token="<unk>", fuse_unk=True)
    made["some bytes"] = tok(unk_token="<unk>", byte_fallback=True, fuse_unk=True, vocab={t: i for i, t in enumerate(["<unk>", "a", "b", "ab", "<0x71>", "<0xC3>", "<0xA9>", "<0xCC>", "<0x81>"])}, merges=["a b"])
    made["merges of bytes"] = tok(byte_fallback=True, unk_token="a", vocab={t: i for i, t in enumerate(["a", "b", "<0x71>", "<0x71><0x71>", "aa", "b<0x71>"])}, merges=["<0x71> <0x71>", "a a", "b <0x71>"])
    made["ignore merges"] = tok(unk_token="<unk>", ignore_merges=True, merges=["b c", "a b"], vocab={t: i for i, t in enumerate(["<unk>", "a", "b", "c", "bc", "ab", "abc", "d", "abcd", " ", "-"])}, pre_tokenizer=split(" ", "Isolated"))
    made["merge twice"] = tok(unk_token="<unk>", merges=["b c", "a b", "b c"], vocab={t: i for i, t in enumerate(["<unk>", "a", "b", "c", "bc", "ab"])})
    made["merges as pairs"] = tok(unk_token="<unk>", merges=[["a", "b"], ["ab", " "], [" ", "c"]], vocab={t: i for i, t in enumerate(["<unk>", "a", "b", "c", " ", "ab", "ab ", " c"])})
    for f in ["NFC", "NFD", "NFKC", "NFKD"]: made["normalizer " + f] = tok(unk_token="<unk>", normalizer={"type": f}, vocab={t: i for i, t in enumerate(["<unk>", "a", "b", "c", "\u00e9", "e", "\u0301", " ", "e\u0301", "1", "2", "\u2044"])}, merges=["e \u0301"])
    made["normalizer strip"] = tok(unk_token="<unk>", normalizer={"type": "Strip", "strip_left": True, "strip_right": True}, added=[add("<m>", 30)])
    made["normalizer strip left"] = tok(unk_token="<unk>", normalizer={"type": "Strip", "strip_left": True, "strip_right": False}, added=[add("<m>", 30, normalized=True)])
    made["normalizer replace regex"] = tok(unk_token="<unk>", normalizer=seq("normalizers", {"type": "Replace", "pattern": {"Regex": "[ab]+|$"}, "content": "xy"}, {"type": "Replace", "pattern": {"String": "xyc"}, "content": "-"}))
    bytelevel = lambda **k: dict({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}, **k)
    letters = [chr(c) for c in list(range(33, 127)) + list(range(161, 173)) + list(range(174, 324))]
    bv = {t: i for i, t in enumerate(letters + ["ab", "\u0120a", "\u0120ab", "\u00c3\u00a9", "a\u00c3", "\u0120\u00c3", "cd", "12"])}
    bm = ["a b", "\u0120 a", "\u0120a b", "\u00c3 \u00a9", "a \u00c3", "\u0120 \u00c3", "c d", "1 2"]
    made["bytelevel"] = tok(vocab=bv, merges=bm, pre_tokenizer=bytelevel(), decoder=bytelevel(), added=[add("<m>", 400, special=True), add("<w>", 401)])
    made["bytelevel prefix"] = tok(vocab=bv, merges=bm, pre_tokenizer=bytelevel(add_prefix_space=True), decoder=bytelevel(), added=[add("<m>", 400, special=True)])
    made["bytelevel no regex"] = tok(vocab=bv, merges=bm, pre_tokenizer=bytelevel(use_regex=False), decoder=bytelevel())
    made["bytelevel then split"] = tok(vocab=bv, merges=bm, pre_tokenizer=seq("pretokenizers", bytelevel(use_regex=False), split("\u0120", "MergedWithNext")), decoder=bytelevel())
    made["bytelevel fallback"] = tok(vocab=dict(bv, **{"<0xC4>": 500, "<0xA0>": 501}), merges=bm, byte_fallback=True, pre_tokenizer=bytelevel(), decoder=bytelevel())
    few = {k: v for k, v in bv.items() if k not in "\u0120\u00c3-z"}
    made["bytelevel missing bytes"] = tok(vocab=few, merges=["a b", "c d"], pre_tokenizer=bytelevel(), decoder=bytelevel())
    made["bytelevel missing bytes unk"] = tok(vocab=dict(few, **{"<unk>": 600}), merges=["a b", "c d"], unk_token="<unk>", fuse_unk=True, pre_tokenizer=bytelevel(), decoder=bytelevel(), ignore_merges=True)
    made["template"] = tok(unk_token="<unk>", added=[add("<m>", 30, special=True), add("<w>", 31, special=True)], post_processor=seq("processors", bytelevel(), {"type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<m>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<w>", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<m>": {"id": "<m>", "ids": [30, 31], "tokens": ["<m>", "<w>"]}, "<w>": {"id": "<w>", "ids": [31], "tokens": ["<w>"]}}}))
    hexes = {t: i for i, t in enumerate(["<unk>", "a", "b"] + ["<0x%02X>" % i for i in range(256)] + [" ", U, "<0xzz>", "<0x0a>", "x<0x41>"])}
    made["byte fallback decoder"] = tok(vocab=hexes, merges=[], byte_fallback=True, unk_token="<unk>", added=[add("<0x41>b", 300)],
        decoder=seq("decoders", {"type": "Replace", "pattern": {"String": U}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}))
    made["strip decoder"] = tok(unk_token="<unk>", decoder=seq("decoders", {"type": "Strip", "content": "c", "start": 0, "stop": 1}, {"type": "Strip", "content": "a", "start": 1, "stop": 0}, {"type": "Replace", "pattern": {"Regex": "b+|c"}, "content": "[x]"}))
    for name, regex in [("word", "\\w+"), ("not word", "\\W+"), ("space", "\\s+"), ("not space", "\\S+"), ("class", "[^\\s\\p{L}\\p{N}]+|[\\w-]+"), ("not space in class", "[\\S]b?"), ("script", "\\p{Han}+|\\p{Latin}+"), ("letter", "\\p{^L}|\\p{Lu}\\P{L}"),
                        ("u", "\\u0061b|\\x63"), ("open", "a{,2}b"), ("case", "(?i:AB|'S)|c"), ("look", "\\s+(?!\\S)|\\s+"), ("possessive", "a++|[bc]*+d"), ("anchors", "^a|d$"), ("dot", ".b?")]:
        made["regex " + name] = tok(unk_token="<unk>", pre_tokenizer=seq("pretokenizers", split(regex, "Isolated"), split("c", "Removed")))
    out = []
    for name, d in made.items():
        t = Tokenizer.from_str(json.dumps(d))
        numbers = {a["content"]: a["id"] for a in d["added_tokens"]}
        real = {t.token_to_id(c): i for c, i in numbers.items()}  # the reference numbers added tokens anew; the file's ids are ours
        cases = []
        for text in texts + EXTRA:
            ids = t.encode(text).ids
            if name == "template":  # its special ids are as written
                mine = ids[:2] + [real.get(i, i) for i in ids[2:-1]] + ids[-1:]
                decoded = None
            else:
                mine, decoded = [real.get(i, i) for i in ids], [t.decode(ids, skip_special_tokens=s) for s in (True, False)]
            cases.append([text, mine] + (decoded or []))
        out.append({"name": name, "tokenizer": d, "cases": cases})
    write(os.path.join(HERE, "synthetic.json"), "[\n" + ",\n".join(compact(x) for x in out) + "\n]\n")
    print(len(out), "made-up tokenizers")

r = random.Random(1)
parts = ["a", "b", "c", "ab", "d", " ", "  ", "-", ".", "1", "2", "<m>", "<w>", "\u00e9", "e\u0301", "\u2581", "q", "\n", "_", "\u4f60", "\u0663", "A", "'s", "<0x41>"]
EXTRA = ["".join(r.choice(parts) for _ in range(r.choice([3, 6, 12]))) for _ in range(10)]
TEXTS = [t.encode("utf-8") for t in CORPUS] + BYTES

if __name__ == "__main__":
    real, smollm2 = sys.argv[1:]
    made_up()
    for name in ["llama3", "qwen3", "deepseek_v3", "llama2", "mistral"]: reduce(name, os.path.join(real, name))
    reduce("smollm2", smollm2)
    reduce_gpt2(os.path.join(real, "gpt2-raw"))
    reduce_sentencepiece(os.path.join(real, "llama2"))
    train_sentencepiece()
