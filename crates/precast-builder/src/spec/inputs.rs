//! `[module.inputs]`: names, dtypes, shapes and padding, in call order.

use precast_store::record::{Dtype, Pad};

use super::{
    Dim, InputSpec,
    reader::{KeyValue, Reader, Span},
};

/// The most axes that torch's reductions take (`at::dim_bitset_size`).
const MAX_RANK: usize = 64;

/// The rule for names.
pub(super) const NAMES: &str =
    "a name has letters, digits and `_`, and does not start with a digit";

const SMALLER: &str = "write a value that the dtype has, or give the input another dtype";

/// The inputs with the places of their axes, in the order of the file.
pub(super) type Inputs = Vec<(InputSpec, Vec<Span>)>;

/// Reads the table.
pub(super) fn inputs<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<Inputs> {
    let section = reader.table(field, "[module.inputs]")?;
    let mut read = Vec::new();
    for (name, place, field) in section.fields() {
        if !is_path(name) {
            let message = format!("`{name}` is not the name of a parameter");
            reader.wrong_help(&place, message, NAMES);
        }
        read.push(input(reader, name, &field));
    }
    if read.is_empty() {
        let help = "leave `inputs` out to capture them from sample inputs";
        reader.wrong_help(&section.place, "[module.inputs] names no input", help);
    }
    read.into_iter().collect()
}

/// Returns whether a text names an input: a parameter, and behind dots the place of a tensor in it, as `past.0.key`.
fn is_path(text: &str) -> bool {
    let (name, place) = text.split_once('.').unwrap_or((text, "0"));
    is_identifier(name)
        && (place.split('.')).all(|part| is_identifier(part) || part.parse::<usize>().is_ok())
}

fn input<'t>(
    reader: &mut Reader<'t>,
    name: &str,
    field: &KeyValue<'t>,
) -> Option<(InputSpec, Vec<Span>)> {
    let section = reader.table(field, &format!("input `{name}`"))?;
    reader.check_keys(
        &section,
        &["dtype", "shape", "pad", "range", "default"],
        &[],
    );
    let dtypes = Dtype::ALL.map(|dtype| (dtype.name(), dtype));
    let dtype = reader.required(&section, "dtype", "dtype = \"float32\"");
    let dtype = dtype.and_then(|field| reader.choice(&field, "dtype", &dtypes));
    let shape = reader.required(&section, "shape", "shape = [\"batch\", 16]");
    let shape = shape.and_then(|field| shape_of(reader, &field));
    let (dtype, (shape, places)) = (dtype?, shape?);
    let pad = match section.field("pad") {
        Some(field) => pad(reader, &field, dtype)?,
        None => zero(dtype),
    };
    let (range, within) = match section.field("range") {
        Some(field) => range(reader, &field, dtype).map(|(range, dim)| (Some(range), dim))?,
        None => (None, None),
    };
    let default = match section.field("default") {
        Some(field) => {
            let range = range.filter(|_| within.is_none());
            Some(default(reader, &field, dtype, &shape, range)?)
        }
        None => None,
    };
    let input = InputSpec {
        name: name.to_owned(),
        dtype,
        shape,
        pad,
        range,
        within,
        default,
    };
    Some((input, places))
}

pub(super) fn shape_of<'t>(
    reader: &mut Reader<'t>,
    field: &KeyValue<'t>,
) -> Option<(Vec<Dim>, Vec<Span>)> {
    let items = reader.array(field, "sizes and dimension names")?;
    if items.len() > MAX_RANK {
        let message = format!(
            "{} has {} axes, more than {MAX_RANK}",
            field.name,
            items.len()
        );
        reader.wrong_help(&field.place, message, "reshape it inside the model");
    }
    let places = items.iter().map(|item| item.place.clone()).collect();
    let dims: Vec<Option<Dim>> = items.iter().map(|item| dim(reader, item)).collect();
    Some((dims.into_iter().collect::<Option<_>>()?, places))
}

fn dim<'t>(reader: &mut Reader<'t>, item: &KeyValue<'t>) -> Option<Dim> {
    match item.value {
        toml::de::DeValue::Integer(_) => positive(reader, item).map(Dim::Fixed),
        toml::de::DeValue::String(name) if is_identifier(name) => {
            Some(Dim::Named(name.to_string()))
        }
        _ => {
            let message = format!("{} must be a size or the name of a dimension", item.name);
            reader.wrong_help(
                &item.place,
                message,
                "as in `shape = [\"batch\", 3, 224, 224]`",
            );
            None
        }
    }
}

/// Reads a size: an integer of at least 1.
pub(super) fn positive<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>) -> Option<i64> {
    let size = reader.integer(field)?;
    if size < 1 {
        reader.wrong_help(
            &field.place,
            format!("{} must be at least 1, not {size}", field.name),
            "a bucket of no size computes nothing",
        );
        return None;
    }
    Some(size)
}

fn zero(dtype: Dtype) -> Pad {
    match dtype {
        Dtype::Bool => Pad::Bool(false),
        float if float.is_float() => Pad::Float(0.0),
        _ => Pad::Int(0),
    }
}

fn pad<'t>(reader: &mut Reader<'t>, field: &KeyValue<'t>, dtype: Dtype) -> Option<Pad> {
    if dtype == Dtype::Bool {
        return reader.boolean(field).map(Pad::Bool);
    }
    if let Some(largest) = largest_float(dtype) {
        let value = reader.number(field)?;
        if value.abs() > largest {
            let message = format!("{} does not fit {dtype}", field.name);
            reader.wrong_help(&field.place, message, SMALLER);
        }
        return Some(Pad::Float(value));
    }
    let value = reader.integer(field)?;
    if !fits(value, dtype) {
        let message = format!("{} does not fit {dtype}", field.name);
        reader.wrong_help(&field.place, message, SMALLER);
    }
    Some(Pad::Int(value))
}

/// Reads a value of the input's dtype and range.
fn default<'t>(
    reader: &mut Reader<'t>,
    field: &KeyValue<'t>,
    dtype: Dtype,
    shape: &[Dim],
    range: Option<[i64; 2]>,
) -> Option<Pad> {
    let value = pad(reader, field, dtype)?;
    if let Some(Dim::Named(dim)) = shape.iter().find(|dim| matches!(dim, Dim::Named(_))) {
        let message = format!(
            "{} is for inputs of one size, and this has `{dim}`",
            field.name
        );
        reader.wrong_help(&field.place, message, "leave it out");
    }
    if let (Pad::Int(own), Some([first, past])) = (value, range)
        && !(first..past).contains(&own)
    {
        let message = format!(
            "{} is {own}, and the range is [{first}, {past}]",
            field.name
        );
        reader.wrong_help(
            &field.place,
            message,
            "write a value that the input may have",
        );
    }
    Some(value)
}

/// Reads the first value and the one past the last; the latter may be the size of a dimension.
fn range<'t>(
    reader: &mut Reader<'t>,
    field: &KeyValue<'t>,
    dtype: Dtype,
) -> Option<([i64; 2], Option<String>)> {
    let items = reader.array(field, "two integers")?;
    if dtype.is_float() || dtype == Dtype::Bool {
        reader.wrong_help(
            &field.place,
            format!("{} is for integers, and the input is {dtype}", field.name),
            "leave it out",
        );
        return None;
    }
    let [first, past] = &items[..] else {
        reader.wrong_help(
            &field.place,
            format!("{} must have two integers, not {}", field.name, items.len()),
            "as in `range = [0, 30522]`",
        );
        return None;
    };
    if let toml::de::DeValue::String(dim) = past.value
        && is_identifier(dim)
    {
        let first = reader.integer(first)?;
        return Some(([first, first + 1], Some(dim.to_string())));
    }
    let (first, past) = (reader.integer(first)?, reader.integer(past)?);
    if first >= past {
        let help = "the first value is included, the second is not, as in `range(0, 10)`";
        reader.wrong_help(&field.place, format!("{} is empty", field.name), help);
    } else if !fits(first, dtype) || !fits(past - 1, dtype) {
        let message = format!("{} does not fit {dtype}", field.name);
        reader.wrong_help(&field.place, message, SMALLER);
    }
    Some(([first, past], None))
}

/// Returns whether an integer dtype holds `value`.
fn fits(value: i64, dtype: Dtype) -> bool {
    match dtype {
        Dtype::Int64 => true,
        Dtype::Int32 => i32::try_from(value).is_ok(),
        Dtype::Int16 => i16::try_from(value).is_ok(),
        Dtype::Int8 => i8::try_from(value).is_ok(),
        Dtype::Uint8 => u8::try_from(value).is_ok(),
        Dtype::Bool | Dtype::Float64 | Dtype::Float32 | Dtype::Float16 | Dtype::Bfloat16 => false,
    }
}

/// Returns the largest finite value of a float dtype.
fn largest_float(dtype: Dtype) -> Option<f64> {
    match dtype {
        Dtype::Float64 => Some(f64::MAX),
        Dtype::Float32 => Some(f64::from(f32::MAX)),
        Dtype::Float16 => Some(f64::from(half::f16::MAX)),
        Dtype::Bfloat16 => Some(f64::from(half::bf16::MAX)),
        _ => None,
    }
}

/// Returns whether `text` is an ASCII identifier of Python.
/// Returns whether a text can be a name in Python, in ASCII.
pub fn is_identifier(text: &str) -> bool {
    let mut chars = text.chars();
    chars
        .next()
        .is_some_and(|c| c.is_ascii_alphabetic() || c == '_')
        && chars.all(|c| c.is_ascii_alphanumeric() || c == '_')
}
