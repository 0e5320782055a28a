// Functions on numbers, as Python has them, with which a captured graph computes sizes.
//
// Integers that do not fit into 64 bits are an error, which Python would not have.

#pragma once

#include <ATen/core/ivalue.h>

#include <cmath>
#include <string>
#include <unordered_map>
#include <vector>

#include "arguments.h"

namespace precast {

using Number = IValue (*)(const std::vector<IValue>&);

namespace numbers {

using Given = const std::vector<IValue>&;

inline const IValue& at(Given given, size_t i) {
  if (i >= given.size()) refuse("it has too few arguments");
  return given[i];
}

inline bool whole(const IValue& one) { return one.isInt() || one.isBool(); }

// A bool counts as 0 or 1.
inline int64_t integer(const IValue& one) {
  if (one.isBool()) return one.toBool();
  if (!one.isInt()) refuse("an integer is wanted");
  return one.toInt();
}

inline double real(const IValue& one) { return whole(one) ? static_cast<double>(integer(one)) : one.toDouble(); }

[[noreturn]] inline void overflow() { refuse("an integer does not fit into 64 bits"); }

inline int64_t floordiv(int64_t a, int64_t b) {
  if (b == 0) refuse("division by zero");
  if (a == INT64_MIN && b == -1) overflow();
  const int64_t quotient = a / b;
  return quotient - (a % b != 0 && (a < 0) != (b < 0));
}

inline int64_t modulo(int64_t a, int64_t b) {
  if (b == 0) refuse("division by zero");
  const int64_t rest = b == -1 ? 0 : a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

inline int64_t to_integer(double value) {
  // 2^63 is the first that does not fit.
  if (!(value >= -9223372036854775808.0 && value < 9223372036854775808.0)) overflow();
  return static_cast<int64_t>(value);
}

inline IValue power(Given given) {
  if (!whole(at(given, 0)) || !whole(at(given, 1)) || integer(given[1]) < 0)
    return std::pow(real(at(given, 0)), real(at(given, 1)));
  int64_t made = 1;
  const int64_t base = integer(given[0]);
  for (int64_t left = integer(given[1]); left > 0; left--) {
    if (__builtin_mul_overflow(made, base, &made)) overflow();
    if (base == 0 || base == 1) return base;
    if (base == -1) return left % 2 ? -1 : 1;
  }
  return made;
}

template <class I, class R>
IValue arithmetic(Given given, I on_integers, R on_reals) {
  const IValue &a = at(given, 0), &b = at(given, 1);
  if (!whole(a) || !whole(b)) return on_reals(real(a), real(b));
  int64_t made;
  if (on_integers(integer(a), integer(b), &made)) overflow();
  return made;
}

template <class F>
IValue compared(Given given, F f) {
  const IValue &a = at(given, 0), &b = at(given, 1);
  return whole(a) && whole(b) ? f(integer(a), integer(b)) : f(real(a), real(b));
}

template <class F>
IValue bits(Given given, F f) {
  const IValue &a = at(given, 0), &b = at(given, 1);
  const int64_t made = f(integer(a), integer(b));
  return a.isBool() && b.isBool() ? IValue(made != 0) : IValue(made);
}

template <class F>
IValue extreme(Given given, F better) {
  IValue found = at(given, 0);
  for (const IValue& one : given)
    if (whole(one) && whole(found) ? better(integer(one), integer(found)) : better(real(one), real(found))) found = one;
  return found;
}

}  // namespace numbers

// The function with this name; null where there is none. worker/eager.py has the Python functions that they stand for.
inline Number number_function(const std::string& name) {
  using namespace numbers;
  static const std::unordered_map<std::string, Number> known = {
      {"add", [](Given g) {
         return arithmetic(g, [](auto a, auto b, auto* c) { return __builtin_add_overflow(a, b, c); },
                           [](double a, double b) { return a + b; });
       }},
      {"sub", [](Given g) {
         return arithmetic(g, [](auto a, auto b, auto* c) { return __builtin_sub_overflow(a, b, c); },
                           [](double a, double b) { return a - b; });
       }},
      {"mul", [](Given g) {
         return arithmetic(g, [](auto a, auto b, auto* c) { return __builtin_mul_overflow(a, b, c); },
                           [](double a, double b) { return a * b; });
       }},
      {"floordiv", [](Given g) {
         return arithmetic(g, [](auto a, auto b, auto* c) { return *c = floordiv(a, b), false; },
                           [](double a, double b) { return std::floor(a / b); });
       }},
      {"mod", [](Given g) {
         return arithmetic(g, [](auto a, auto b, auto* c) { return *c = modulo(a, b), false; },
                           [](double a, double b) { return a - b * std::floor(a / b); });
       }},
      {"truediv", [](Given g) -> IValue {
         const double by = real(at(g, 1));
         if (by == 0) refuse("division by zero");
         return real(at(g, 0)) / by;
       }},
      {"pow", power},
      {"neg", [](Given g) -> IValue {
         if (!whole(at(g, 0))) return -real(g[0]);
         int64_t made;
         if (__builtin_sub_overflow(int64_t{0}, integer(g[0]), &made)) overflow();
         return made;
       }},
      {"abs", [](Given g) -> IValue {
         if (!whole(at(g, 0))) return std::abs(real(g[0]));
         if (integer(g[0]) == INT64_MIN) overflow();
         return std::abs(integer(g[0]));
       }},
      {"eq", [](Given g) { return compared(g, [](auto a, auto b) { return IValue(a == b); }); }},
      {"ne", [](Given g) { return compared(g, [](auto a, auto b) { return IValue(a != b); }); }},
      {"lt", [](Given g) { return compared(g, [](auto a, auto b) { return IValue(a < b); }); }},
      {"le", [](Given g) { return compared(g, [](auto a, auto b) { return IValue(a <= b); }); }},
      {"gt", [](Given g) { return compared(g, [](auto a, auto b) { return IValue(a > b); }); }},
      {"ge", [](Given g) { return compared(g, [](auto a, auto b) { return IValue(a >= b); }); }},
      {"and", [](Given g) { return bits(g, [](int64_t a, int64_t b) { return a & b; }); }},
      {"or", [](Given g) { return bits(g, [](int64_t a, int64_t b) { return a | b; }); }},
      {"xor", [](Given g) { return bits(g, [](int64_t a, int64_t b) { return a ^ b; }); }},
      {"not", [](Given g) -> IValue { return real(at(g, 0)) == 0; }},
      {"max", [](Given g) { return extreme(g, [](auto a, auto b) { return a > b; }); }},
      {"min", [](Given g) { return extreme(g, [](auto a, auto b) { return a < b; }); }},
      {"sum", [](Given g) -> IValue {
         int64_t made = 0;
         for (const IValue& one : g)
           if (__builtin_add_overflow(made, integer(one), &made)) overflow();
         return made;
       }},
      {"ite", [](Given g) -> IValue { return real(at(g, 0)) != 0 ? at(g, 1) : at(g, 2); }},
      {"float", [](Given g) -> IValue { return real(at(g, 0)); }},
      {"int", [](Given g) -> IValue {
         return whole(at(g, 0)) ? integer(g[0]) : to_integer(std::trunc(real(g[0])));
       }},
      {"floor", [](Given g) -> IValue {
         return whole(at(g, 0)) ? integer(g[0]) : to_integer(std::floor(real(g[0])));
       }},
      {"ceil", [](Given g) -> IValue {
         return whole(at(g, 0)) ? integer(g[0]) : to_integer(std::ceil(real(g[0])));
       }},
      {"round", [](Given g) -> IValue {
         // To the nearest even, as Python.
         return whole(at(g, 0)) ? integer(g[0]) : to_integer(std::nearbyint(real(g[0])));
       }},
      {"sqrt", [](Given g) -> IValue { return std::sqrt(real(at(g, 0))); }},
  };
  const auto found = known.find(name);
  return found == known.end() ? nullptr : found->second;
}

}  // namespace precast
