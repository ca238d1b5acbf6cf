#!/usr/bin/perl -0777 -p
# CUDA C++ to C++: the five things of a .cu file that g++ cannot parse or that the engine must see. Lines keep their numbers.
#   kernel<T><<<grid, block, smem, stream>>>(args)    EMU_LAUNCH((kernel<T>), grid, block, smem, stream)(args)
#   __global__ void f(...) {                          __global__ void f(...) { EMU_KERNEL(bounds)
#   extern __shared__ T s[];                          T *s = (T *)emu::dynamic_shared(alignment);
#   __shared__ T a[8], b;                             struct emu_s1 { T a[8]; }; auto &a = emu::shared<emu_s1>().a; ...
#   asm volatile("ptx" : "=r"(a) : "r"(b) : "memory") emu::ptx(EMU_ASM("ptx"), emu::operand<'=','r'>(a), ...)
BEGIN {
    our $str = qr/"(?:\\.|[^"\\])*"/;
    our $par = qr/(\((?:[^()"]++|"(?:\\.|[^"\\])*"|(?-1))*+\))/;       # balanced parentheses
    our $ang = qr/(<(?:[^<>;{}]++|(?-1))*+>)/;                         # balanced angle brackets
    our $ali = qr/(?:(?:__align__|alignas)\s*\([^()]*\)\s*)/;
}
# Comments and strings are put away, so that nothing in them is rewritten; all but the short strings that constraints are.
s{("[=+&]*[a-zA-Z0-9]"|'(?:\\.|[^'\\\n])')|($str|//[^\n]*|/\*.*?\*/)}{$1 // do { push @c, $2; "\x03$#c\x04" }}gse;
s{([A-Za-z_](?:\w|::)*(?:\s*$ang)?)\s*<<<(.*?)>>>\s*\(}{EMU_LAUNCH(($1), $3)(}gs;
s<(\b__global__\b[^;{}()]*(?:__launch_bounds__\s*$par[^;{}()]*)?$par(?:\s|\x03\d+\x04)*)\{>
 <"$1\{ EMU_KERNEL" . ($2 // "(0)")>ge;
s{\bextern\s+($ali*)__shared__\s+($ali*)([\w:\s]+?)\s+($ali*)(\w+)\s*\[\s*\]\s*;}{
    my ($type, $name, $a) = ($3, $5, "$1$2$4"); $a = $a =~ /\((.*)\)/ ? $1 : 16;
    "$type *$name = ($type *)emu::dynamic_shared($a);" }ge;
s{(?:\bstatic\s+)?($ali*)\b__shared__\s+([^;]*?)\s*;}{
    my ($align, $list, $type, $out) = ($1, $2, "", "");
    for my $d (split /,(?![^\[\(<]*[\]\)>])/, $list) {
        $d =~ /^(.*?)(\w+)\s*((?:\[[^\]]*\]\s*)*)$/s or die "$ARGV: cannot parse __shared__ $d";
        my ($own, $name, $dims) = ($1, $2, $3); $type = $own if $own =~ /\w/; $n++;
        $out .= "struct emu_s$n { $align$type $name$dims; }; auto &$name = emu::shared<emu_s$n>().$name; ";
    } $out }ge;
s{\b__(?:device|constant)__\s+([^;{}()=]*?\w[\w\s\[\]+*/-]*)(=|;)}{EMU_DEVICE_VARIABLE $1$2}g;
# Operands stand inside asm(...) or in macros that asm(...) uses: a one-letter string before a parenthesis is nothing else.
s{"([=+]?)&?([a-zA-Z0-9])"\s*$par}{my ($m, $k, $x) = ($1 || " ", $2, $3); "emu::operand<'$m','$k'>$x"}ge;
s{\b(?:asm|__asm__)\s*(?:(?:__)?volatile(?:__)?\s*)?$par}{
    my ($a, @k) = (substr($1, 1, -1));
    my $lines = $a =~ tr/\n//;
    $a =~ s/($str)/push @k, $1; "\x01$#k\x02"/ge;
    $a =~ s/(emu::operand<.*?>)$par/push @k, "$1$2"; "\x01$#k\x02"/ge;
    my ($text, $ops) = split /:/, $a, 2; $ops //= "";
    $ops =~ s/:/,/g; $ops =~ s/,(?:\s*,)+/,/g; $ops =~ s/^\s*,|,\s*$//g;
    $a = "emu::ptx(EMU_ASM($text)" . ($ops =~ /\S/ ? ", $ops" : "");
    1 while $a =~ s/\x01(\d+)\x02/$k[$1]/g;
    $a . "\n" x ($lines - ($a =~ tr/\n//)) . ")" }ge;
s{\b__noinline__\b}{EMU_NOINLINE}g;
s{\bNULL\b}{nullptr}g; # a pointer still, when a launch has passed it on by value
s/\x03(\d+)\x04/$c[$1]/g;
$_ = "#line 1 \"$ARGV\"\n$_";
