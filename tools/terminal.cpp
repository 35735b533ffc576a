#include "tools/terminal.h"

#include <algorithm>
#include <array>
#include <clocale>
#include <cmath>
#include <cstdlib>
#include <cwchar>
#include <langinfo.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <fmt/color.h>

namespace terrace {
namespace {

constexpr int kUsualColumns = 80;
constexpr std::string_view kArrow = "→";

/// The value of a variable of the environment; empty where it is not set.
std::string_view variable(const char* name) {
  const char* const value = std::getenv(name);
  return value != nullptr ? value : "";
}

/// A locale's characters, without a change of the program's own locale.
class Characters {
 public:
  /// An empty name is what the environment says.
  explicit Characters(const char* name) : locale_(newlocale(LC_CTYPE_MASK, name, locale_t{})) {}
  ~Characters() {
    if (locale_ != locale_t{}) freelocale(locale_);
  }
  Characters(const Characters&) = delete;
  Characters& operator=(const Characters&) = delete;

  locale_t locale() const { return locale_; }

 private:
  const locale_t locale_;
};

bool is_utf8_locale() {
  const Characters characters("");
  return characters.locale() != locale_t{} &&
         std::string_view(nl_langinfo_l(CODESET, characters.locale())) == std::string_view("UTF-8");
}

fmt::text_style style_of(Style style) {
  switch (style) {
    case Style::heading:
      return fmt::emphasis::bold;
    case Style::accent:
      return fmt::fg(fmt::terminal_color::cyan);
    case Style::low:
      return fmt::fg(fmt::terminal_color::green);
    case Style::middle:
      return fmt::fg(fmt::terminal_color::yellow);
    case Style::high:
      return fmt::fg(fmt::terminal_color::red);
    case Style::plain:
      break;
  }
  return {};
}

}  // namespace

bool is_terminal(std::FILE* out) {
  const std::string_view kind = variable("TERM");
  return isatty(fileno(out)) == 1 && !kind.empty() && kind != "dumb";
}

Looks looks_of(std::FILE* out) {
  if (!is_terminal(out)) return {};
  return {.colours = variable("NO_COLOR").empty(), .utf8 = is_utf8_locale()};
}

int columns_of(std::FILE* out) {
  winsize size{};
  const bool known = ioctl(fileno(out), TIOCGWINSZ, &size) == 0 && size.ws_col > 0;
  return known ? size.ws_col : kUsualColumns;
}

std::string styled(std::string_view text, Style style, Looks looks) {
  if (!looks.colours || style == Style::plain || text.empty()) return std::string(text);
  return fmt::format(style_of(style), "{}", text);
}

int width_of(std::string_view text) {
  static const Characters characters("C.UTF-8");
  const locale_t before = uselocale(characters.locale());  // of this thread
  std::mbstate_t state{};
  int columns = 0;
  while (!text.empty()) {
    wchar_t character = 0;
    const std::size_t bytes = std::mbrtowc(&character, text.data(), text.size(), &state);
    if (bytes == 0 || bytes > text.size()) {
      state = {};
      ++columns;
      text.remove_prefix(1);
    } else {
      columns += std::max(wcwidth(character), 0);
      text.remove_prefix(bytes);
    }
  }
  uselocale(before);
  return columns;
}

std::string in_charset(std::string_view text, Looks looks) {
  std::string result(text);
  if (looks.utf8) return result;
  for (std::size_t at = result.find(kArrow); at != std::string::npos; at = result.find(kArrow, at)) {
    result.replace(at, kArrow.size(), "->");
  }
  return result;
}

std::string bar(double share, int cells, Looks looks) {
  constexpr std::array<std::string_view, 8> eighths{"", "▏", "▎", "▍", "▌", "▋", "▊", "▉"};
  const double full = std::clamp(share, 0.0, 1.0) * cells;
  if (!looks.utf8) {
    const auto whole = static_cast<std::size_t>(std::lround(full));
    return "[" + std::string(whole, '#') + std::string(static_cast<std::size_t>(cells) - whole, ' ') + "]";
  }
  const auto parts = static_cast<std::size_t>(std::lround(full * 8));
  std::string text = "▕";
  for (std::size_t cell = 0; cell < parts / 8; ++cell) text += "█";
  text += eighths[parts % 8];
  const std::size_t used = parts / 8 + (parts % 8 > 0 ? 1 : 0);
  return text + std::string(static_cast<std::size_t>(cells) - used, ' ') + "▏";
}

}  // namespace terrace
