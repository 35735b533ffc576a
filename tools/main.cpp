/// The `terrace` command.

#include "tools/command.h"

int main(int argc, char** argv) { return terrace::run_command(argc, argv); }
