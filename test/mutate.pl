#!/usr/bin/perl
# mutate.pl test/mutations.txt kernels.cu: the kernels with every mutation of the table in them, each behind a switch,
# so that they are compiled once. A text to be changed that ends in ; or } is a statement, which becomes
#     { if (mutant(3)) { the broken one } else { the right one } }
# any other an expression, (mutant(3) ? (the broken one) : (the right one)). What follows "cut" is changed for good.
use strict;
my ($table, $kernels) = @ARGV;
sub slurp { open my $f, '<', $_[0] or die "$_[0]: $!\n"; local $/; <$f> }
my $source = slurp($kernels);
my (@mutations, @edits, $last);
for (split /\n/, slurp($table)) {
    if (/^\* (.*)/) {
        push @mutations, {name => $1} if $1 !~ /^cut\b/;
        $last = {n => $1 =~ /^cut\b/ ? 0 : scalar @mutations, find => '', with => ''};
        push @edits, $last;
    } elsif (/^  (\w+)( [^:]*)?: (\w+)$/) {
        @{$mutations[-1]}{qw(trial environment detector)} = ($1, $2 // '', uc $3);
    } elsif (/^- (.*)/) {
        if ($last->{done}) { $last = {n => $last->{n}, find => '', with => ''}; push @edits, $last }
        $last->{find} .= "$1\n";
    } elsif (/^\+ ?(.*)/) { $last->{with} .= "$1\n"; $last->{done} = 1 }
    elsif (/\S/ && !/^#/) { die "$table, line $.: neither a title, a trial, - nor +: $_\n" }
}
my (%places, $faults);
for my $e (@edits) {
    chomp(my $find = $e->{find});
    my $pattern = join '\s+', map { quotemeta } split ' ', $find; # lines may be wrapped otherwise
    my @at;
    while ($source =~ /$pattern/g) { push @at, [$-[0], $+[0]] }
    my $what = $e->{n} ? $mutations[$e->{n} - 1]{name} : 'cut';
    if (@at == 1) { push @{$places{"$at[0][0] $at[0][1]"}}, $e; next }
    print STDERR "$table, $what: stands in $kernels ", scalar @at, " times, not once: $find\n";
    $faults++;
}
exit 1 if $faults;
my $end = length $source;
for (sort { (split ' ', $b)[0] <=> (split ' ', $a)[0] } keys %places) {
    my ($from, $to) = split ' ';
    die "$table: two mutations overlap: " . substr($source, $from, $to - $from) . "\n" if $to > $end;
    $end = $from;
    my $text = substr($source, $from, $to - $from);
    my $statement = $text =~ /[;}]\s*(\/\/.*)?$/;
    for my $e (@{$places{$_}}) {
        if (!$e->{n}) { $text = $e->{with} }
        elsif ($statement) { $text = "{ if (mutant($e->{n})) {\n$e->{with}} else {\n$text\n} }" }
        else { $text = "(mutant($e->{n}) ? ($e->{with}) : ($text))" }
    }
    substr($source, $from, $to - $from) = $text;
}
print "#pragma GCC diagnostic ignored \"-Wunused-function\"\nstatic int mutation; // 0: none\n";
print "__attribute__((const, noinline, no_sanitize(\"thread\"), no_sanitize_coverage))\n";
print "static bool mutant(int n) { return n == mutation; }\n$source\n#define MUTATIONS \\\n";
print "    {\"$_->{name}\", \"$_->{trial}\", \"$_->{environment}\", $_->{detector}}, \\\n" for @mutations;
print "\n#include \"../test/mutations.cc\"\n";
