/// What a terminal takes, and text made for it: widths, styles, bars.
///
/// Knows nothing of LibTorch, whose copy of fmt the one behind this does not meet. Thread-safe.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>

namespace terrace {

/// How text may look where it goes.
struct Looks {
  bool colours = false;
  bool utf8 = false;  ///< more than ASCII
};

/// Whether lines that stand there can be written anew: a terminal, and no dumb one.
bool is_terminal(std::FILE* out);

/// Colours on a terminal, unless NO_COLOR is set to anything (no-color.org); UTF-8 as the locale says. Plain elsewhere.
Looks looks_of(std::FILE* out);

/// The width of the terminal at this moment; 80 where it does not say.
int columns_of(std::FILE* out);

enum class Style : std::uint8_t { plain, heading, accent, low, middle, high };

/// `text` in a style where there are colours, and as it is elsewhere.
std::string styled(std::string_view text, Style style, Looks looks);

/// The columns that UTF-8 text takes: two for a wide character, none for one that combines. A byte that is no UTF-8
/// takes one.
int width_of(std::string_view text);

/// Arrows as ASCII where there is no more.
std::string in_charset(std::string_view text, Looks looks);

/// `share` of `cells` filled, to an eighth of one where there are blocks for that; two columns more for its ends.
std::string bar(double share, int cells, Looks looks);

}  // namespace terrace
