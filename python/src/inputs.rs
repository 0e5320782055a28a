//! Arguments of a call: nested values of Python as the flat inputs of a module.

use precast_runtime::{Outputs, RuntimeError, Tensor, Value};
use precast_store::record::{Dtype, Input};
use pyo3::{
    prelude::*,
    types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple},
};
use smallvec::SmallVec;

use crate::{
    errors,
    tensors::{self, Library},
};

/// The inputs of one variant of a module.
pub struct Variant {
    /// The flat inputs: `past.0` for the first tensor of the argument `past`.
    pub inputs: Vec<String>,
    /// The arguments, in order.
    pub arguments: Vec<String>,
    /// The places of the arguments, by their names.
    places: Vec<(String, Place)>,
}

/// The place of an argument, or of a part of one.
enum Place {
    /// A flat input.
    Input(usize),
    /// Parts by their keys, in order: `0`, `1`, … for a list.
    Parts(Vec<(String, Self)>),
}

impl Variant {
    pub fn of(inputs: Vec<String>) -> Self {
        let mut arguments: Vec<String> = Vec::new();
        for input in &inputs {
            let argument = input.split('.').next().unwrap_or(input);
            if arguments.last().is_none_or(|last| last != argument) {
                arguments.push(argument.to_owned());
            }
        }
        let mut places = Vec::new();
        for (at, input) in inputs.iter().enumerate() {
            put(&mut places, input, at);
        }
        Self {
            inputs,
            arguments,
            places,
        }
    }
}

/// Adds the place of a flat input. The name of an input that is also a part of another leaves that one without a place.
fn put(places: &mut Vec<(String, Place)>, path: &str, at: usize) {
    let (key, rest) = match path.split_once('.') {
        Some((key, rest)) => (key, Some(rest)),
        None => (path, None),
    };
    let known = places.iter().position(|(known, _)| known == key);
    let known = known.unwrap_or_else(|| {
        places.push((key.to_owned(), Place::Parts(Vec::new())));
        places.len() - 1
    });
    match (rest, &mut places[known].1) {
        (None, place) => *place = Place::Input(at),
        (Some(rest), Place::Parts(parts)) => put(parts, rest, at),
        (Some(_), Place::Input(_)) => {}
    }
}

/// The inputs of one call.
pub enum Inputs {
    /// Tensors in the module's order.
    InOrder(SmallVec<[Tensor; 8]>),
    Named(Vec<(String, Tensor)>),
}

impl Inputs {
    /// Runs a call in the form that they have; `now` waits for the device's check of its values.
    pub fn run(
        &self,
        now: bool,
        in_order: impl FnOnce(&[Tensor]) -> Result<Outputs, RuntimeError>,
        named: impl FnOnce(&[(&str, &Tensor)]) -> Result<Outputs, RuntimeError>,
    ) -> Result<Outputs, RuntimeError> {
        let outputs = match self {
            Self::InOrder(tensors) => in_order(tensors)?,
            Self::Named(all) => {
                let all: SmallVec<[(&str, &Tensor); 8]> = all
                    .iter()
                    .map(|(name, tensor)| (name.as_str(), tensor))
                    .collect();
                named(&all)?
            }
        };
        if now {
            outputs.check()?;
        }
        Ok(outputs)
    }
}

/// One tensor of an argument: the argument, and the path to the tensor in it.
struct Found {
    argument: Argument,
    path: String,
    tensor: Tensor,
}

#[derive(Clone)]
enum Argument {
    At(usize),
    Named(String),
}

/// Takes the inputs of a module beside tokens and positions, in order or by name; `inputs` has all of them.
pub fn others(
    module: &str,
    inputs: &[Input],
    args: &Bound<'_, PyTuple>,
    kwargs: Option<&Bound<'_, PyDict>>,
) -> PyResult<Vec<Value>> {
    let others = inputs.iter().filter(|input| input.within.is_none());
    let others: Vec<&Input> = others.skip(1).collect();
    let refused = |message: String| {
        let names = others.iter().map(|input| format!("`{}`", input.name));
        let hint = match &names.collect::<Vec<_>>()[..] {
            [] => "it takes tokens alone".to_owned(),
            names => format!("beside tokens it takes {}", names.join(", ")),
        };
        errors::bad_input(message, &hint)
    };
    let none = args.is_empty() && kwargs.is_none_or(|kwargs| kwargs.is_empty());
    if none && others.iter().all(|input| input.default.is_some()) {
        // The session has their values.
        return Ok(Vec::new());
    }
    if args.len() > others.len() {
        let count = args.len();
        return Err(refused(format!(
            "`{module}` got {count} inputs beside tokens"
        )));
    }
    for name in kwargs.into_iter().flat_map(|kwargs| kwargs.keys()) {
        let name: String = name.extract()?;
        let place = others.iter().position(|input| input.name == name);
        let problem = match place {
            None => "is none of its inputs",
            Some(place) if place < args.len() => "is given twice",
            Some(_) => continue,
        };
        return Err(refused(format!("`{name}` of `{module}` {problem}")));
    }
    let value = |(at, input): (usize, &&Input)| {
        let given = match (args.get_item(at), kwargs) {
            (Ok(given), _) => Some(given),
            (Err(_), Some(kwargs)) => kwargs.get_item(&input.name)?,
            (Err(_), None) => None,
        };
        let given = given.ok_or_else(|| refused(format!("`{module}` lacks `{}`", input.name)))?;
        value_of(input, &given)
    };
    others.iter().enumerate().map(value).collect()
}

/// Returns a copy of a tensor, or a value with this number in all elements.
fn value_of(input: &Input, given: &Bound<'_, PyAny>) -> PyResult<Value> {
    let sizes = input
        .layout
        .shape
        .iter()
        .map(|&size| usize::try_from(size).unwrap_or(0));
    let shape: Vec<usize> = sizes.collect();
    let count = shape.iter().product();
    let number = given.is_instance_of::<PyFloat>() || given.is_instance_of::<PyInt>();
    let value = match input.layout.dtype {
        _ if !number => Value::try_from(&tensors::take(given, &input.name)?.0),
        Dtype::Float32 => Value::new(&vec![given.extract::<f32>()?; count], &shape),
        Dtype::Float64 => Value::new(&vec![given.extract::<f64>()?; count], &shape),
        Dtype::Int64 => Value::new(&vec![given.extract::<i64>()?; count], &shape),
        Dtype::Int32 => Value::new(&vec![given.extract::<i32>()?; count], &shape),
        Dtype::Bool => Value::new(&vec![given.is_truthy()?; count], &shape),
        other => {
            let message = format!("`{}` is {other}, and a number is none", input.name);
            return Err(errors::bad_input(message, "give a tensor"));
        }
    };
    value.map_err(|error| errors::runtime(&error))
}

/// Takes the arguments of a call, and returns the library of the first tensor.
pub fn of(
    args: &Bound<'_, PyTuple>,
    kwargs: Option<&Bound<'_, PyDict>>,
    variants: &[Variant],
) -> PyResult<(Inputs, Library)> {
    let mut library = None;
    if let Some((variant, values)) = variants.iter().find_map(|variant| {
        let same = |other: &&Variant| other.inputs.len() == variant.inputs.len();
        let values = fit(args, kwargs, variant)?;
        (variants.iter().filter(same).count() == 1).then_some((variant, values))
    }) {
        let names = variant.inputs.iter().map(String::as_str);
        let values = values.iter().flatten().zip(names);
        let inputs = in_order(values, &mut library)?;
        return Ok((inputs, library.unwrap_or(Library::Other)));
    }
    // The runtime picks a variant by their number, or says which numbers there are.
    if kwargs.is_none_or(|kwargs| kwargs.is_empty())
        && args.iter().all(|arg| tensors::is_tensor(&arg))
    {
        let args: SmallVec<[Bound<'_, PyAny>; 8]> = args.iter().collect();
        let names = variants[0].inputs.iter().map(String::as_str);
        let names = names.chain(std::iter::repeat("input"));
        let inputs = in_order(args.iter().zip(names), &mut library)?;
        return Ok((inputs, library.unwrap_or(Library::Other)));
    }
    let mut found = Vec::new();
    for (at, arg) in args.iter().enumerate() {
        let name = variants[0]
            .arguments
            .get(at)
            .map_or("input", String::as_str);
        flatten(&arg, name, &Argument::At(at), "", &mut found, &mut library)?;
    }
    for (name, arg) in kwargs.into_iter().flatten() {
        let name: String = name.extract()?;
        let argument = Argument::Named(name.clone());
        flatten(&arg, &name, &argument, "", &mut found, &mut library)?;
    }
    let names = |variant: &Variant| -> Option<Vec<String>> {
        let one = |found: &Found| {
            let name = match &found.argument {
                Argument::At(at) => variant.arguments.get(*at)?,
                Argument::Named(name) => name,
            };
            Some(format!("{name}{}", found.path))
        };
        found.iter().map(one).collect()
    };
    let fits = |names: &Vec<String>, variant: &Variant| {
        names.len() == variant.inputs.len()
            && names.iter().all(|name| variant.inputs.contains(name))
    };
    let fitting = variants
        .iter()
        .filter_map(|variant| names(variant).map(|names| (names, variant)))
        .find(|(names, variant)| fits(names, variant))
        .map(|(names, _)| names);
    // Without a fitting variant the runtime says which inputs there are.
    let names = match fitting.or_else(|| names(&variants[0])) {
        Some(names) => names,
        None => {
            let (given, takes) = (args.len(), variants[0].arguments.join(", "));
            return Err(errors::bad_input(
                format!("{given} positional arguments are too many"),
                &format!("the arguments are {takes}"),
            ));
        }
    };
    let tensors = found.into_iter().map(|found| found.tensor);
    let named = names.into_iter().zip(tensors).collect();
    Ok((Inputs::Named(named), library.unwrap_or(Library::Other)))
}

/// Takes tensors in their order.
fn in_order<'a, 'py: 'a>(
    tensors: impl Iterator<Item = (&'a Bound<'py, PyAny>, &'a str)>,
    library: &mut Option<Library>,
) -> PyResult<Inputs> {
    let mut inputs = SmallVec::new();
    for (tensor, name) in tensors {
        let (tensor, of) = tensors::take(tensor, name)?;
        prefer(library, of);
        inputs.push(tensor);
    }
    Ok(Inputs::InOrder(inputs))
}

/// Takes the tensors of a list in their order, and empties the list. Not with the objects of Python that they were:
/// those can only be freed with the GIL.
pub fn taken(
    tensors: &Bound<'_, PyList>,
    variants: &[Variant],
) -> PyResult<(Vec<Tensor>, Library)> {
    let (mut library, mut taken) = (None, Vec::with_capacity(tensors.len()));
    let names = variants[0].inputs.iter().map(String::as_str);
    for (tensor, name) in tensors.iter().zip(names.chain(std::iter::repeat("input"))) {
        let (tensor, of) = tensors::take(&tensor, name)?;
        prefer(&mut library, of);
        let alone = tensor.view(&tensor.shape(), &tensor.stride(), 0);
        taken.push(alone.map_err(|reason| errors::tensor(name, &reason))?);
    }
    tensors.del_slice(0, tensors.len())?;
    Ok((taken, library.unwrap_or(Library::Other)))
}

/// The tensor of each flat input; all are there.
type Values<'py> = SmallVec<[Option<Bound<'py, PyAny>>; 8]>;

/// Returns the tensors of arguments that nest exactly as those of a variant do, in its order. This is the usual call,
/// and the text of a path takes longer than its tensor.
fn fit<'py>(
    args: &Bound<'py, PyTuple>,
    kwargs: Option<&Bound<'py, PyDict>>,
    variant: &Variant,
) -> Option<Values<'py>> {
    let mut values: Values<'py> = SmallVec::new();
    values.resize(variant.inputs.len(), None);
    for (arg, (_, place)) in args.iter().zip(&variant.places) {
        fill(arg, place, &mut values)?;
    }
    if let Some(kwargs) = kwargs {
        fill_by_key(kwargs, &variant.places, &mut values)?;
    }
    let fits = args.len() <= variant.places.len() && values.iter().all(Option::is_some);
    fits.then_some(values)
}

/// Puts the tensors of a value into their places; none if it does not nest as the place does.
fn fill<'py>(value: Bound<'py, PyAny>, place: &Place, values: &mut Values<'py>) -> Option<()> {
    match place {
        Place::Input(at) if values[*at].is_none() && tensors::is_tensor(&value) => {
            values[*at] = Some(value);
            Some(())
        }
        _ if value.is_none() => Some(()),
        Place::Input(_) => None,
        Place::Parts(parts) => {
            if let Ok(dict) = value.cast::<PyDict>() {
                return fill_by_key(dict, parts, values);
            }
            let mut parts = parts.iter().enumerate();
            let mut fill_next = |value| {
                let (at, (key, place)) = parts.next()?;
                (key.parse() == Ok(at)).then_some(())?;
                fill(value, place, values)
            };
            if let Ok(tuple) = value.cast::<PyTuple>() {
                tuple.iter().try_for_each(&mut fill_next)
            } else {
                let list = value.cast::<PyList>().ok()?;
                list.iter().try_for_each(&mut fill_next)
            }
        }
    }
}

fn fill_by_key<'py>(
    dict: &Bound<'py, PyDict>,
    parts: &[(String, Place)],
    values: &mut Values<'py>,
) -> Option<()> {
    for (key, value) in dict {
        let key = key.cast::<PyString>().ok()?.to_str().ok()?;
        let (_, place) = parts.iter().find(|(part, _)| part == key)?;
        fill(value, place, values)?;
    }
    Some(())
}

/// A tensor of torch decides, wherever it stands; else the first one.
fn prefer(library: &mut Option<Library>, of: Library) {
    if library.is_none() || of == Library::Torch {
        *library = Some(of);
    }
}

/// The number of levels that an argument may have. The stack of a thread has room for many more.
const DEEPEST: usize = 64;

/// Appends the tensors of an argument. `None` is an argument that is not given.
fn flatten(
    value: &Bound<'_, PyAny>,
    name: &str,
    argument: &Argument,
    path: &str,
    found: &mut Vec<Found>,
    library: &mut Option<Library>,
) -> PyResult<()> {
    if value.is_none() {
        return Ok(());
    }
    if tensors::is_tensor(value) {
        let (tensor, of) = tensors::take(value, &format!("{name}{path}"))?;
        prefer(library, of);
        found.push(Found {
            argument: argument.clone(),
            path: path.to_owned(),
            tensor,
        });
        return Ok(());
    }
    if path.matches('.').count() > DEEPEST {
        return Err(errors::bad_input(
            format!("`{name}` nests deeper than {DEEPEST} levels"),
            "a list that contains itself has no end",
        ));
    }
    if let Ok(dict) = value.cast::<PyDict>() {
        for (key, value) in dict {
            let path = format!("{path}.{}", key.str()?);
            flatten(&value, name, argument, &path, found, library)?;
        }
        return Ok(());
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        for (at, value) in value.try_iter()?.enumerate() {
            let path = format!("{path}.{at}");
            flatten(&value?, name, argument, &path, found, library)?;
        }
        return Ok(());
    }
    let scalar = value.is_instance_of::<PyInt>()
        || value.is_instance_of::<PyFloat>()
        || value.is_instance_of::<PyBool>()
        || value.is_instance_of::<PyString>();
    let class = value.get_type().name()?.to_string();
    let hint = if scalar {
        "numbers and texts are part of the artifact, fixed when it was built: leave it out, or give it as a tensor"
    } else {
        "give torch tensors, NumPy arrays or objects with `__dlpack__`, also in lists, tuples and dicts"
    };
    Err(errors::bad_input(
        format!("`{name}{path}` is no tensor but a {class}"),
        hint,
    ))
}
