#include "internal.h"
int emu_races() { return 0; }
bool emu_traces() { return false; }
