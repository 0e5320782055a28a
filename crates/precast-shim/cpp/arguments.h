// The arguments of operators: values of a description, converted to the types of their schemas.
//
// Shared by the calls of artifacts (operators.cpp) and by eager (eager.cpp).

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/jit_type.h>

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace precast {

using c10::IValue;
using c10::TypeKind;
using c10::TypePtr;

// As in `Value` of operators.rs and `Kind` of calls.rs.
enum Kind { NONE, TENSOR, TENSORS, OPTIONAL_TENSORS, INT, INTS, FLOAT, FLOATS, BOOL, BOOLS, STRING, SCALAR_TYPE, LAYOUT, MEMORY_FORMAT, DEVICE, COMPLEX, VALUE };

[[noreturn]] inline void refuse(const std::string& why) { throw std::runtime_error(why); }

// torch's export schema numbers these its own way (torch/_export/serde/schema.py).
inline c10::ScalarType scalar_type(int64_t number) {
  using T = c10::ScalarType;
  switch (number) {
    case 1: return T::Byte;
    case 2: return T::Char;
    case 3: return T::Short;
    case 4: return T::Int;
    case 5: return T::Long;
    case 6: return T::Half;
    case 7: return T::Float;
    case 8: return T::Double;
    case 9: return T::ComplexHalf;
    case 10: return T::ComplexFloat;
    case 11: return T::ComplexDouble;
    case 12: return T::Bool;
    case 13: return T::BFloat16;
    case 28: return T::UInt16;
    case 29: return T::Float8_e4m3fn;
    case 30: return T::Float8_e5m2;
    case 31: return T::Float8_e4m3fnuz;
    case 32: return T::Float8_e5m2fnuz;
    case 33: return T::Float8_e8m0fnu;
    case 34: return T::UInt32;
    case 35: return T::UInt64;
    default: refuse("scalar type " + std::to_string(number) + " is not known");
  }
}

inline c10::Layout layout(int64_t number) {
  using L = c10::Layout;
  switch (number) {
    case 1: return L::Sparse;
    case 2: return L::SparseCsr;
    case 3: return L::SparseCsc;
    case 4: return L::SparseBsr;
    case 5: return L::SparseBsc;
    case 6: return L::Mkldnn;
    case 7: return L::Strided;
    default: refuse("layout " + std::to_string(number) + " is not known");
  }
}

inline c10::MemoryFormat memory_format(int64_t number) {
  using M = c10::MemoryFormat;
  switch (number) {
    case 1: return M::Contiguous;
    case 2: return M::ChannelsLast;
    case 3: return M::ChannelsLast3d;
    case 4: return M::Preserve;
    default: refuse("memory format " + std::to_string(number) + " is not known");
  }
}

inline TypePtr plain(const TypePtr& type) {
  const auto* optional = type->castRaw<c10::OptionalType>();
  return optional ? optional->getElementType() : type;
}

inline TypePtr element(const TypePtr& type) {
  const auto* list = type->castRaw<c10::ListType>();
  return list ? list->getElementType() : nullptr;
}

inline bool integral(const TypePtr& type) {
  return type && (type->kind() == TypeKind::IntType || type->kind() == TypeKind::SymIntType);
}

// One value of a description that is fixed: its kind says which field counts.
struct Fixed {
  int32_t kind;
  int64_t integer;
  double number;
  const char* text;
};

// Returns the value as an argument of this type, which is no list. A device of the same kind as `device` becomes
// `device`.
inline IValue fixed(const TypePtr& declared, const Fixed& given, c10::Device device) {
  if (given.kind == NONE) return {};
  const TypePtr type = plain(declared);
  auto need = [&](bool right) {
    if (!right) refuse("it was compiled with another type than `" + declared->str() + "`");
  };
  switch (type->kind()) {
    case TypeKind::IntType:
    case TypeKind::SymIntType: need(given.kind == INT); return given.integer;
    case TypeKind::NumberType:
      if (given.kind == INT) return given.integer;
      if (given.kind == COMPLEX) return c10::complex<double>(given.number, std::strtod(given.text, nullptr));
      need(given.kind == FLOAT || given.kind == BOOL);
      if (given.kind == FLOAT) return given.number;
      return given.integer != 0;
    case TypeKind::FloatType:
    case TypeKind::SymFloatType:
      need(given.kind == FLOAT || given.kind == INT);
      return given.kind == FLOAT ? given.number : static_cast<double>(given.integer);
    case TypeKind::BoolType:
    case TypeKind::SymBoolType: need(given.kind == BOOL); return given.integer != 0;
    case TypeKind::StringType: need(given.kind == STRING); return std::string(given.text);
    case TypeKind::ScalarTypeType: need(given.kind == SCALAR_TYPE); return scalar_type(given.integer);
    case TypeKind::LayoutType: need(given.kind == LAYOUT); return layout(given.integer);
    case TypeKind::MemoryFormatType: need(given.kind == MEMORY_FORMAT); return memory_format(given.integer);
    case TypeKind::DeviceObjType: {
      need(given.kind == DEVICE);
      const c10::Device named(given.text);
      return named.type() == device.type() ? device : named;
    }
    default: refuse("a call can't be given a `" + declared->str() + "`");
  }
}

}  // namespace precast
