// A program that uses a floor below LibTorch: how would two parameters lie in chunks?
#include <cstdio>

#include <terrace/memory/layout.h>

int main() {
  const terrace::LayoutRun runs[] = {{.elements = 100, .element_bytes = 4, .group = 0},
                                     {.elements = 50, .element_bytes = 4, .group = 0}};
  const terrace::Layout layout = terrace::Layout::plan(runs, 1 << 20);
  std::printf("chunks %zu, second at element %llu\n", layout.chunks.size(),
              static_cast<unsigned long long>(layout.places[1].element_offset));
}
