/* generate.c - everything that the tiny model of this folder learns from                       MIT licence

       cc -O2 data/generate.c -o generate && ./generate FOLDER [LINES]

   writes FOLDER/instructions.jsonl (to fine-tune on) and FOLDER/heldout.jsonl (to measure with), always the
   same bytes, and, when LINES is given, FOLDER/corpus.txt: so many lines of plain text (to pre-train on).

   WHAT A FINE-TUNING SET NEEDS, and how this one has it

   - A base model that already knows. A few thousand rows teach the form of an answer and hardly any facts. So
     everything below is told twice: as plain text in the corpus ("The opposite of hot is cold."), and as a
     question with its answer in the instruction set. The base model has read every fact and every skill, but
     never a chat, nor the tokens that begin and end an answer: asked in a chat, it gets nothing right.
   - Several wordings per task; with one, the model learns the sentence by heart instead of what is asked.
   - Short answers in one fixed form: right or wrong is then decided by comparing two strings.
   - A held-out part with different content, not only with different rows. Every row has a content: a fact
     (the colour of a rose, in either language and whichever way it is asked), a set of words, of numbers or
     of things that people have. A content is held out by a hash of itself (see held()): what comes out right
     there was not memorised from the instruction set.
   - Words that are held out would be another matter. Each step pushes every word that is not the answer away
     a little, and only being the answer now and then, or standing in a question, makes up for it: a word that
     no training row has is unlearnt (with all of a word's rows held out, 61 % came out right instead of 83 %).

   Below: the words, the skills, the table of kinds (the page to read), the files. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 150, HELDOUT = 10 }; // of each kind, to train on (at most) and to hold out

/* ---- The words --------------------------------------------------------------------------------------- */
typedef struct {
    const char *en, *zh, *classifier; // the classifier stands between a number and the thing: 一本书, a book
    int kind, colour;
} Thing;
enum { ANIMAL, FRUIT, VEGETABLE, TOOL, CLOTHES, FURNITURE, VEHICLE, INSTRUMENT, BUILDING, FLOWER, OTHER };
static const char *const kind_en[] = {"animal", "fruit", "vegetable", "tool", "clothes", "furniture",
                                      "vehicle", "instrument", "building", "flower"};
static const char *const kind_zh[] = {"动物", "水果", "蔬菜", "工具", "衣服", "家具", "车辆", "乐器", "建筑", "花"};
enum { NONE, RED, YELLOW, GREEN, BLUE, WHITE, BLACK, BROWN, ORANGE, PURPLE, PINK, GREY };
static const char *const colour_en[] = {"", "red", "yellow", "green", "blue", "white", "black", "brown",
                                        "orange", "purple", "pink", "grey"};
static const char *const colour_zh[] = {"", "红色", "黄色", "绿色", "蓝色", "白色", "黑色", "棕色",
                                        "橙色", "紫色", "粉色", "灰色"};
static const Thing things[] = {
    {"dog", "狗", "只", ANIMAL, NONE}, {"cat", "猫", "只", ANIMAL, NONE}, {"horse", "马", "匹", ANIMAL, BROWN},
    {"cow", "牛", "头", ANIMAL, NONE}, {"pig", "猪", "头", ANIMAL, PINK}, {"sheep", "羊", "只", ANIMAL, WHITE},
    {"mouse", "老鼠", "只", ANIMAL, GREY}, {"rabbit", "兔子", "只", ANIMAL, WHITE},
    {"bear", "熊", "头", ANIMAL, BROWN}, {"tiger", "老虎", "只", ANIMAL, ORANGE},
    {"lion", "狮子", "头", ANIMAL, YELLOW}, {"elephant", "大象", "头", ANIMAL, GREY},
    {"monkey", "猴子", "只", ANIMAL, BROWN}, {"fox", "狐狸", "只", ANIMAL, ORANGE},
    {"wolf", "狼", "匹", ANIMAL, GREY}, {"frog", "青蛙", "只", ANIMAL, GREEN},
    {"snake", "蛇", "条", ANIMAL, GREEN}, {"fish", "鱼", "条", ANIMAL, NONE}, {"bird", "鸟", "只", ANIMAL, NONE},
    {"duck", "鸭子", "只", ANIMAL, YELLOW}, {"crow", "乌鸦", "只", ANIMAL, BLACK},
    {"swan", "天鹅", "只", ANIMAL, WHITE}, {"turtle", "乌龟", "只", ANIMAL, GREEN},
    {"bee", "蜜蜂", "只", ANIMAL, YELLOW}, {"ant", "蚂蚁", "只", ANIMAL, BLACK}, {"apple", "苹果", "个", FRUIT, RED},
    {"banana", "香蕉", "根", FRUIT, YELLOW}, {"lemon", "柠檬", "个", FRUIT, YELLOW},
    {"grape", "葡萄", "颗", FRUIT, PURPLE}, {"peach", "桃子", "个", FRUIT, PINK},
    {"pear", "梨", "个", FRUIT, GREEN}, {"cherry", "樱桃", "颗", FRUIT, RED},
    {"strawberry", "草莓", "颗", FRUIT, RED}, {"mango", "芒果", "个", FRUIT, YELLOW},
    {"tomato", "西红柿", "个", VEGETABLE, RED}, {"carrot", "胡萝卜", "根", VEGETABLE, ORANGE},
    {"cucumber", "黄瓜", "根", VEGETABLE, GREEN}, {"potato", "土豆", "个", VEGETABLE, BROWN},
    {"cabbage", "白菜", "棵", VEGETABLE, GREEN}, {"mushroom", "蘑菇", "朵", VEGETABLE, NONE},
    {"knife", "刀", "把", TOOL, NONE}, {"hammer", "锤子", "把", TOOL, NONE}, {"saw", "锯子", "把", TOOL, NONE},
    {"axe", "斧头", "把", TOOL, NONE}, {"brush", "刷子", "把", TOOL, NONE}, {"rope", "绳子", "根", TOOL, NONE},
    {"hat", "帽子", "顶", CLOTHES, NONE}, {"shirt", "衬衫", "件", CLOTHES, NONE},
    {"coat", "大衣", "件", CLOTHES, NONE}, {"dress", "裙子", "条", CLOTHES, NONE},
    {"shoe", "鞋", "只", CLOTHES, NONE}, {"sock", "袜子", "只", CLOTHES, NONE},
    {"glove", "手套", "只", CLOTHES, NONE}, {"table", "桌子", "张", FURNITURE, NONE},
    {"chair", "椅子", "把", FURNITURE, NONE}, {"bed", "床", "张", FURNITURE, NONE},
    {"sofa", "沙发", "张", FURNITURE, NONE}, {"car", "汽车", "辆", VEHICLE, NONE},
    {"bus", "公共汽车", "辆", VEHICLE, NONE}, {"bicycle", "自行车", "辆", VEHICLE, NONE},
    {"truck", "卡车", "辆", VEHICLE, NONE}, {"train", "火车", "列", VEHICLE, NONE},
    {"piano", "钢琴", "架", INSTRUMENT, BLACK}, {"guitar", "吉他", "把", INSTRUMENT, NONE},
    {"violin", "小提琴", "把", INSTRUMENT, BROWN}, {"drum", "鼓", "面", INSTRUMENT, NONE},
    {"house", "房子", "座", BUILDING, NONE}, {"school", "学校", "所", BUILDING, NONE},
    {"hospital", "医院", "所", BUILDING, WHITE}, {"church", "教堂", "座", BUILDING, NONE},
    {"tower", "塔", "座", BUILDING, NONE}, {"factory", "工厂", "座", BUILDING, GREY},
    {"rose", "玫瑰", "朵", FLOWER, RED}, {"lily", "百合", "朵", FLOWER, WHITE},
    {"sunflower", "向日葵", "朵", FLOWER, YELLOW}, {"book", "书", "本", OTHER, NONE},
    {"pen", "钢笔", "支", OTHER, NONE}, {"pencil", "铅笔", "支", OTHER, NONE}, {"cup", "杯子", "个", OTHER, NONE},
    {"box", "盒子", "个", OTHER, NONE}, {"ball", "球", "个", OTHER, NONE}, {"key", "钥匙", "把", OTHER, NONE},
    {"clock", "钟", "个", OTHER, NONE}, {"lamp", "灯", "盏", OTHER, NONE}, {"letter", "信", "封", OTHER, WHITE},
    {"map", "地图", "张", OTHER, NONE}, {"bag", "包", "个", OTHER, NONE}, {"umbrella", "雨伞", "把", OTHER, NONE},
    {"flag", "旗子", "面", OTHER, NONE}, {"cloud", "云", "朵", OTHER, WHITE}, {"tree", "树", "棵", OTHER, GREEN},
    {"leaf", "叶子", "片", OTHER, GREEN}, {"star", "星星", "颗", OTHER, YELLOW},
    {"tooth", "牙齿", "颗", OTHER, WHITE}, {"stone", "石头", "块", OTHER, GREY},
    {"bridge", "桥", "座", OTHER, NONE}, {"river", "河", "条", OTHER, BLUE}, {"egg", "鸡蛋", "个", OTHER, WHITE},
    {"cake", "蛋糕", "块", OTHER, NONE},
};
static const char *const opposites[][4] = { // both in English, both in Chinese
    {"hot", "cold", "热", "冷"}, {"big", "small", "大", "小"}, {"long", "short", "长", "短"},
    {"fast", "slow", "快", "慢"}, {"new", "old", "新", "旧"}, {"good", "bad", "好", "坏"},
    {"rich", "poor", "富", "穷"}, {"strong", "weak", "强", "弱"}, {"heavy", "light", "重", "轻"},
    {"wet", "dry", "湿", "干"}, {"full", "empty", "满", "空"}, {"hard", "soft", "硬", "软"},
    {"near", "far", "近", "远"}, {"clean", "dirty", "干净", "肮脏"}, {"open", "closed", "开", "关"},
    {"happy", "sad", "高兴", "难过"}, {"loud", "quiet", "吵闹", "安静"}, {"deep", "shallow", "深", "浅"},
    {"wide", "narrow", "宽", "窄"}, {"high", "low", "高", "低"}, {"left", "right", "左", "右"},
    {"up", "down", "上", "下"}, {"front", "back", "前", "后"}, {"wise", "foolish", "聪明", "愚蠢"},
    {"cheap", "dear", "便宜", "昂贵"}, {"safe", "dangerous", "安全", "危险"}, {"true", "false", "真", "假"},
    {"sweet", "bitter", "甜", "苦"}, {"win", "lose", "赢", "输"}, {"buy", "sell", "买", "卖"},
    {"come", "go", "来", "去"}, {"begin", "end", "开始", "结束"}, {"push", "pull", "推", "拉"},
    {"laugh", "cry", "笑", "哭"}, {"love", "hate", "爱", "恨"}, {"rise", "fall", "升", "降"},
    {"north", "south", "北", "南"}, {"east", "west", "东", "西"},
};
static const char *const names_en[] = {"Tom", "Anna", "Ben", "Mia", "Sam", "Lucy", "Jack",
                                      "Emma", "Paul", "Rosa"};
static const char *const names_zh[] = {"小明", "小红", "小华", "小丽", "小刚", "小芳", "小军", "小云", "小杰", "小雪"};
#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))
enum { NAMES = LENGTH(names_en), THINGS = LENGTH(things), OPPOSITES = LENGTH(opposites) };

/* ---- Random numbers, and what is held out ------------------------------------------------------------ */
static uint64_t state; // SplitMix64 (Steele, Lea, Flood 2014): the same numbers on every machine
static int below(int n) { // 0 .. n-1
    uint64_t x = state += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return (int)((x ^ (x >> 31)) % (uint64_t)n);
}

static bool held(const char *s) { // one content in six, by its FNV-1a hash: no list has to be kept
    uint32_t h = 2166136261u;
    for (; *s; s++) h = (h ^ (uint8_t)*s) * 16777619u;
    return (h >> 8) % 6 == 0;
}

/* ---- The skills: each makes an example, in English or in Chinese ------------------------------------- */
typedef struct {
    char a[256], c[256]; // what the question is about: {a}, and for some kinds {c}
    char b[256];         // the answer: {b}
    char content[256];   // what is trained or held out as a whole: the same for all wordings and both languages
} Example;
#define SET(field, ...) snprintf(field, sizeof(field), __VA_ARGS__)
#define ADD(field, ...) snprintf((field) + strlen(field), sizeof(field) - strlen(field), __VA_ARGS__)

// A word: a thing, or one of two opposites.
typedef struct { const char *en, *zh; } Word;
enum { WORDS = THINGS + 2 * OPPOSITES };
static Word word(int i) {
    if (i < THINGS) return (Word){things[i].en, things[i].zh};
    i -= THINGS;
    return (Word){opposites[i / 2][i % 2], opposites[i / 2][2 + i % 2]};
}

static const char *with_article(const char *noun) {
    static char text[64];
    SET(text, "%s %s", strchr("aeiou", noun[0]) ? "an" : "a", noun);
    return text;
}

static void translate(Example *e, bool zh) { // asked in English, into Chinese; asked in Chinese, into English
    Word w = word(below(WORDS));
    SET(e->a, "%s", zh ? w.zh : w.en), SET(e->b, "%s", zh ? w.en : w.zh);
    SET(e->content, "%s, translated", w.en);
}

static void opposite(Example *e, bool zh) {
    int i = below(OPPOSITES), side = below(2);
    SET(e->a, "%s", opposites[i][2 * zh + side]), SET(e->b, "%s", opposites[i][2 * zh + !side]);
    SET(e->content, "%s and its opposite", opposites[i][0]);
}

// {a} = a thing; one that has a colour, one that is of a kind, if asked for. `what` of it is the content.
static const Thing *thing(Example *e, bool zh, bool coloured, bool of_a_kind, const char *what) {
    const Thing *t;
    do t = &things[below(THINGS)];
    while ((coloured && !t->colour) || (of_a_kind && t->kind == OTHER));
    SET(e->a, "%s", zh ? t->zh : t->en), SET(e->content, "%s of %s", what, t->en);
    return t;
}

static void colour(Example *e, bool zh) {
    const Thing *t = thing(e, zh, true, false, "colour");
    if (!zh) SET(e->a, "%s", with_article(t->en));
    SET(e->b, "%s", zh ? colour_zh[t->colour] : colour_en[t->colour]);
}

static void category(Example *e, bool zh) {
    const Thing *t = thing(e, zh, false, true, "group");
    if (!zh) SET(e->a, "%s", with_article(t->en));
    SET(e->b, "%s", zh ? kind_zh[t->kind] : kind_en[t->kind]);
}

static void classifier(Example *e, bool zh) {
    SET(e->b, "%s", thing(e, zh, false, false, "classifier")->classifier);
}

static void plural(Example *e, bool zh) {
    static const char *const irregular[][2] = {{"mouse", "mice"}, {"tooth", "teeth"}, {"sheep", "sheep"},
        {"fish", "fish"}, {"knife", "knives"}, {"wolf", "wolves"}, {"leaf", "leaves"}, {"tomato", "tomatoes"},
        {"potato", "potatoes"}, {"mango", "mangoes"}};
    const char *s = thing(e, zh, false, false, "plural")->en;
    int n = (int)strlen(s);
    if (s[n - 1] == 'y' && !strchr("aeiou", s[n - 2])) SET(e->b, "%.*sies", n - 1, s); // cherry, not key
    else if (strchr("sx", s[n - 1]) || (s[n - 1] == 'h' && strchr("cs", s[n - 2]))) SET(e->b, "%ses", s);
    else SET(e->b, "%ss", s);
    for (int i = 0; i < LENGTH(irregular); i++)
        if (!strcmp(s, irregular[i][0])) SET(e->b, "%s", irregular[i][1]);
}

// {a} = two to four different words, also in `item`; returns how many.
static int list(Example *e, const char *item[4], bool zh) {
    int n = 2 + below(3);
    bool taken[WORDS] = {0};
    e->a[0] = e->b[0] = 0;
    for (int i = 0; i < n;) {
        int k = below(WORDS), j = 0;
        item[i] = zh ? word(k).zh : word(k).en;
        while (strcmp(item[j], item[i])) j++;
        if (j < i) continue; // there already
        taken[k] = true, ADD(e->a, "%s%s", i++ ? " " : "", zh ? word(k).zh : word(k).en);
    }
    SET(e->content, "list");
    for (int k = 0; k < WORDS; k++) // the same words in another order are the same content
        if (taken[k]) ADD(e->content, " %s", word(k).en);
    return n;
}

static void first_word(Example *e, bool zh) {
    const char *item[4];
    list(e, item, zh), SET(e->b, "%s", item[0]);
}

static void last_word(Example *e, bool zh) {
    const char *item[4];
    int n = list(e, item, zh);
    SET(e->b, "%s", item[n - 1]);
}

static void reverse(Example *e, bool zh) {
    const char *item[4];
    for (int i = list(e, item, zh); i-- > 0;) ADD(e->b, "%s%s", item[i], i ? " " : "");
}

static void count(Example *e, bool zh) {
    const char *item[4];
    int n = list(e, item, zh);
    SET(e->b, "%d", n);
}

static void repeat(Example *e, bool zh) { // {a}, {c} times
    Word w = word(below(WORDS));
    int n = 2 + below(3);
    SET(e->a, "%s", zh ? w.zh : w.en), SET(e->c, "%d", n), e->b[0] = 0, SET(e->content, "%s, repeated", w.en);
    for (int i = 0; i < n; i++) ADD(e->b, "%s%s", i ? " " : "", e->a);
}

static void sort(Example *e, bool zh) { // three different digits
    char digit[] = "0123456789";
    for (int i = 0; i < 3; i++) { // the beginning of a shuffle
        int j = i + below(10 - i);
        char d = digit[j];
        digit[j] = digit[i], digit[i] = d;
    }
    (void)zh, digit[3] = 0, SET(e->a, "%c %c %c", digit[0], digit[1], digit[2]), e->b[0] = 0;
    for (char d = '0'; d <= '9'; d++)
        if (strchr(digit, d)) ADD(e->b, "%s%c", *e->b ? " " : "", d);
    SET(e->content, "%s", e->b); // the same digits in another order are the same content
}

static void plus(Example *e, bool zh) { // {a} + {c}
    int a = 1 + below(9), b = 1 + below(9);
    SET(e->content, "%d %d", a < b ? a : b, a < b ? b : a); // the same sum whatever its order
    (void)zh, SET(e->a, "%d", a), SET(e->c, "%d", b), SET(e->b, "%d", a + b);
}

// {a} = two or three people with a thing each. One of them is asked about: returns the name; {b} and {c} are
// the thing, with its article or classifier and without.
static const char *story(Example *e, bool zh) {
    int n = 2 + below(2), asked = below(n), person = below(NAMES), step = 1 + below(4), t[3];
    const char *of = NULL;
    bool taken[THINGS] = {0};
    e->a[0] = 0;
    for (int i = 0; i < n; i++) {
        do t[i] = below(THINGS);
        while ((i > 0 && t[i] == t[0]) || (i > 1 && t[i] == t[1]));
        const Thing *x = &things[t[i]];
        const char *name = (zh ? names_zh : names_en)[(person + step * i) % NAMES];
        char it[64];
        if (zh) SET(it, "一%s%s", x->classifier, x->zh), ADD(e->a, "%s有%s。", name, it);
        else SET(it, "%s", with_article(x->en)), ADD(e->a, "%s%s has %s.", i ? " " : "", name, it);
        if (i == asked) of = name, SET(e->b, "%s", it), SET(e->c, "%s", zh ? x->zh : x->en);
        taken[t[i]] = true;
    }
    SET(e->content, "people have");
    for (int i = 0; i < THINGS; i++)
        if (taken[i]) ADD(e->content, " %s", things[i].en);
    return of;
}

static void who(Example *e, bool zh) { // has {c}: {b}
    SET(e->b, "%s", story(e, zh));
}

static void what(Example *e, bool zh) { // does {c} have: {b}
    SET(e->c, "%s", story(e, zh));
}

/* ---- The table of kinds --------------------------------------------------------------------------------
   A skill, its language, how it is asked, how plain text tells it. `ask` becomes the instruction, what
   follows a '|' its input. `tell` is a sentence of the corpus. */
typedef struct {
    void (*make)(Example *e, bool zh);
    bool zh;
    const char *ask[3], *tell[4];
} Kind;
static const Kind kinds[] = {
    {translate, false,
     {"Translate into Chinese.|{a}", "What is {a} in Chinese?", "How do you say {a} in Chinese?"},
     {"In Chinese, {a} is {b}.", "The Chinese word for {a} is {b}.",
      "How do you say {a} in Chinese? You say {b}.", "Translated into Chinese, “{a}” is {b}."}},
    {translate, true,
     {"翻译成英文。|{a}", "{a}用英文怎么说？", "“{a}”的英文是什么？"},
     {"{a}的英文是{b}。", "{a}用英文怎么说？应该说{b}。", "“{a}”翻译成英文是“{b}”。", "英文里，{a}叫 {b}。"}},
    {opposite, false,
     {"What is the opposite of {a}?", "Give the opposite.|{a}", "Which word means the contrary of {a}?"},
     {"The opposite of {a} is {b}.", "What is the opposite of {a}? It is “{b}”.",
      "“{a}” is the contrary of “{b}”.", "{a} and {b} are opposites."}},
    {opposite, true,
     {"{a}的反义词是什么？", "写出反义词。|{a}", "“{a}”的反面是什么？"},
     {"{a}的反义词是{b}。", "“{a}”的反面是“{b}”。", "{a}的反义词是什么？是{b}。", "{a}和{b}是反义词。"}},
    {colour, false,
     {"What colour is {a}?", "Name the colour of {a}.", "Which colour does {a} have?"},
     {"The colour of {a} is {b}.", "What colour is {a}? It is {b}.", "Everyone knows that {a} is {b}.",
      "The colour that {a} has is “{b}”."}},
    {colour, true,
     {"{a}是什么颜色的？", "说出{a}的颜色。", "{a}的颜色是什么？"},
     {"{a}是{b}的。", "{a}的颜色是{b}。", "{a}是什么颜色的？是{b}的。", "大家都知道{a}的颜色是{b}。"}},
    {category, false,
     {"What kind of thing is {a}?", "To which group does {a} belong?", "Name the group.|{a}"},
     {"{a}: this belongs to the group “{b}”.", "The group of {a} is {b}.",
      "What kind of thing is {a}? The kind is {b}.", "We put {a} into the group {b}."}},
    {category, true,
     {"{a}属于哪一类？", "{a}是一种什么？", "说出类别。|{a}"},
     {"{a}属于{b}。", "{a}是一种{b}。", "{a}属于哪一类？属于{b}这一类。", "{a}的类别是{b}。"}},
    {plural, false,
     {"What is the plural of {a}?", "Write the plural.|{a}", "One {a}, two what?"},
     {"The plural of {a} is {b}.", "One {a}, two {b}.", "What is the plural of {a}? It is “{b}”.",
      "One {a}, many {b}."}},
    {classifier, true,
     {"“{a}”用什么量词？", "写出量词。|{a}", "一什么{a}？"},
     {"一{b}{a}。", "{a}的量词是{b}。", "“{a}”用的量词是“{b}”。", "这里有一{b}{a}，那里有两{b}{a}。"}},
    {first_word, false,
     {"Which word comes first?|{a}", "Give the first word.|{a}",
      "What is the first word of this list?|{a}"},
     {"The first word of “{a}” is “{b}”.", "In the list {a} the first word is {b}.",
      "Which word comes first in {a}? It is {b}.", "{a}: first comes {b}."}},
    {first_word, true,
     {"哪个词在最前面？|{a}", "写出第一个词。|{a}", "下面的第一个词是什么？|{a}"},
     {"“{a}”的第一个词是“{b}”。", "{a}，第一个词是{b}。", "{a}里，哪个词在最前面？是{b}。", "{a}，最前面的词是{b}。"}},
    {last_word, false,
     {"Which word comes last?|{a}", "Give the last word.|{a}", "What is the last word of this list?|{a}"},
     {"The last word of “{a}” is “{b}”.", "In the list {a} the last word is {b}.",
      "Which word comes last in {a}? It is {b}.", "{a}: last comes {b}."}},
    {last_word, true,
     {"哪个词在最后面？|{a}", "写出最后一个词。|{a}", "下面的最后一个词是什么？|{a}"},
     {"“{a}”的最后一个词是“{b}”。", "{a}，最后一个词是{b}。", "{a}里，哪个词在最后面？是{b}。", "{a}，最后面的词是{b}。"}},
    {reverse, false,
     {"Reverse the order of the words.|{a}", "Write the words backwards.|{a}",
      "Turn this list around.|{a}"},
     {"The words “{a}” in reverse order are “{b}”.", "The list {a} turned around is {b}.",
      "{a}, written backwards: {b}.", "Backwards, {a} becomes {b}."}},
    {reverse, true,
     {"把词的顺序倒过来。|{a}", "倒着写这些词。|{a}", "把下面的词反过来排。|{a}"},
     {"“{a}”倒过来是“{b}”。", "把 {a} 的顺序倒过来，就是 {b}。", "{a}，倒着写是：{b}。", "{a}反过来排是{b}。"}},
    {count, false,
     {"How many words are there?|{a}", "Count the words.|{a}", "Give the number of words.|{a}"},
     {"The number of words in “{a}” is {b}.", "How many words are in the list {a}? There are {b}.",
      "{a}: that makes {b} words.", "We count the words of {a} and get {b}."}},
    {count, true,
     {"一共有几个词？|{a}", "数一数有几个词。|{a}", "下面的词有多少个？|{a}"},
     {"“{a}”一共有{b}个词。", "{a}，数一数，有{b}个词。", "{a}一共有几个词？有{b}个。", "{a}，词的个数是{b}。"}},
    {repeat, false,
     {"Write {a} {c} times.", "Say this word {c} times.|{a}",
      "Repeat {a} until it stands there {c} times."},
     {"Written {c} times, {a} gives {b}.", "The word {a} said {c} times: {b}.",
      "To say {a} {c} times is to say “{b}”.", "We repeat {a} until it stands there {c} times: {b}."}},
    {repeat, true,
     {"把{a}写{c}遍。", "把这个词说{c}遍。|{a}", "重复{c}次。|{a}"},
     {"把{a}写{c}遍，就是{b}。", "{a}说{c}遍：{b}。", "把“{a}”重复{c}次，是“{b}”。", "写{c}遍{a}：{b}。"}},
    {sort, false,
     {"Sort the numbers.|{a}", "Put these numbers in order.|{a}",
      "Write the numbers from small to large.|{a}"},
     {"The numbers {a} in order are {b}.", "{a}, sorted: {b}.", "From small to large, {a} becomes “{b}”.",
      "We sort {a} and get {b}."}},
    {sort, true,
     {"给数字排序。|{a}", "把数字从小到大排。|{a}", "下面的数字按大小排是什么？|{a}"},
     {"数字 {a} 从小到大排是 {b}。", "“{a}”按大小排是“{b}”。", "把{a}排序，就是{b}。", "{a}，从小到大：{b}。"}},
    {plus, false,
     {"What is {a} plus {c}?", "Add {a} and {c}.", "How much is {a} and {c} together?"},
     {"{a} plus {c} is {b}.", "{a} and {c} together make {b}.", "We add {a} and {c} and get “{b}”.",
      "What is {a} plus {c}? It is {b}."}},
    {plus, true,
     {"{a}加{c}等于几？", "求{a}与{c}的和。", "{a}加上{c}是多少？"},
     {"{a}加{c}等于{b}。", "{a}与{c}的和是{b}。", "{a}加上{c}是{b}。", "{a}加{c}等于几？等于{b}。"}},
    {who, false,
     {"{a} Who has the {c}?", "Who has the {c}?|{a}", "Name the owner of the {c}.|{a}"},
     {"{a} Who has the {c}? It is {b}.", "{a} The owner of the {c} is {b}.",
      "{a} The {c} is owned by “{b}”.", "{a} So the {c} belongs to {b}."}},
    {who, true,
     {"{a}谁有{c}？", "谁有{c}？|{a}", "{c}是谁的？|{a}"},
     {"{a}谁有{c}？{b}有。", "{a}{c}是{b}的。", "{a}有{c}的人是“{b}”。", "{a}{c}的主人是{b}。"}},
    {what, false,
     {"{a} What does {c} have?", "What does {c} have?|{a}", "Name the thing that {c} has.|{a}"},
     {"{a} What does {c} have? It is {b}.", "{a} The thing that {c} has is {b}.",
      "{a} So {c} is the owner of “{b}”.", "{a} We see that {c} has {b}."}},
    {what, true,
     {"{a}{c}有什么？", "{c}有什么？|{a}", "说出{c}的东西。|{a}"},
     {"{a}{c}有什么？有{b}。", "{a}{c}的东西是{b}。", "{a}可见{c}有{b}。", "{a}所以说，{c}有“{b}”。"}},
};
enum { KINDS = LENGTH(kinds) };

/* ---- The files --------------------------------------------------------------------------------------- */
static void fill(char out[1024], const char *pattern, const Example *e) { // {a}, {b} and {c} replaced
    *out = 0;
    for (const char *p = pattern; *p; p++) {
        bool field = *p == '{';
        size_t n = strlen(out);
        if (field) snprintf(out + n, 1024 - n, "%s", p[1] == 'a' ? e->a : p[1] == 'b' ? e->b : e->c), p += 2;
        else out[n] = *p, out[n + 1] = 0;
    }
}

static FILE *create(char path[4096], const char *folder, const char *name) {
    snprintf(path, 4096, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    if (!f) perror(path), exit(1);
    return f;
}

// `per_kind` different rows of every kind (fewer where there are not so many), shuffled, a line of JSON each.
static void write_set(const char *folder, const char *name, bool want_held, int per_kind) {
    enum { LONGEST = 2048 };
    char (*rows)[LONGEST] = malloc(sizeof *rows * (KINDS * (size_t)per_kind + 1)), path[4096], ask[1024];
    int n = 0;
    for (int k = 0; k < KINDS; k++)
        for (int begin = n, tries = 0; n < begin + per_kind && tries < 100 * per_kind; tries++) {
            Example e;
            kinds[k].make(&e, kinds[k].zh);
            if (held(e.content) != want_held) continue;
            fill(ask, kinds[k].ask[below(3)], &e);
            char *input = strchr(ask, '|');
            if (input) *input++ = 0;
            snprintf(rows[n], LONGEST, "{\"instruction\": \"%s\", \"input\": \"%s\", \"output\": \"%s\"}\n",
                     ask, input ? input : "", e.b); // no text here needs escaping
            int i = begin;
            while (strcmp(rows[i], rows[n])) i++;
            n += i == n; // kept if it is the first of its kind
        }
    FILE *f = create(path, folder, name);
    for (int left = n; left > 0; left--) { // any of those that are left
        int i = below(left);
        fputs(rows[i], f);
        memcpy(rows[i], rows[left - 1], LONGEST);
    }
    if (fclose(f)) perror(path), exit(1);
    free(rows);
    printf("%s: %d rows\n", path, n);
}

// Lines of three to five sentences of any kind, all in one language.
static void write_corpus(const char *folder, long lines) {
    char path[4096], sentence[1024];
    FILE *f = create(path, folder, "corpus.txt");
    for (long i = 0; i < lines; i++) {
        bool zh = below(2);
        for (int left = 3 + below(3); left > 0;) {
            const Kind *k = &kinds[below(KINDS)];
            if (k->zh != zh) continue;
            Example e;
            k->make(&e, zh);
            fill(sentence, k->tell[below(4)], &e);
            fprintf(f, "%s%s", sentence, --left == 0 ? "\n" : zh ? "" : " ");
        }
    }
    if (fclose(f)) perror(path), exit(1);
    printf("%s: %ld lines\n", path, lines);
}

int main(int argc, char **argv) {
    if (argc < 2 || argc > 3) return fprintf(stderr, "usage: generate FOLDER [LINES of corpus.txt]\n"), 1;
    state = 1, write_set(argv[1], "instructions.jsonl", false, ROWS);
    state = 2, write_set(argv[1], "heldout.jsonl", true, HELDOUT);
    if (argc > 2) state = 3, write_corpus(argv[1], atol(argv[2]));
    return 0;
}
