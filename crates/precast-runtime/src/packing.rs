//! The order of a weight set on a device: matrices that artifacts concatenate are contiguous, so that the result is a
//! view.
//!
//! An artifact may use several matrices as one, since one product is faster than several of the same rows. As a copy,
//! like other [`super::prepacked`] constants, that would take memory: of a Llama with 1.1 B parameters in bfloat16 (2.2
//! GB), the query, key, value, gate and up matrices are 1.25 GB, which would be on the device twice. Without a gap
//! between them, the concatenated matrix is a view of them.
//!
//! The parameters of a training step are states of a session, each with its own memory on the device. Of the weight set
//! they only take their first values, once for each training: those tensors stay in the mapped file, and the device has
//! the parameters once.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use precast_store::{
    Digest,
    record::{First, Program, Recipe},
};

use super::{
    ffi::{Handle, Meta, contiguous},
    layout::bytes_of,
    source::Source,
};

/// The places of a weight set's tensors, as programs use them.
#[derive(Default)]
pub(super) struct Placement {
    pub concatenated: Concatenated,
    /// The names of tensors that stay on the host.
    pub on_host: BTreeSet<String>,
}

impl Placement {
    /// Returns the places on a CUDA device, but for the tensors that stay on the host.
    pub fn of(source: &dyn Source, programs: &[Arc<Program>], on_host: BTreeSet<String>) -> Self {
        Self {
            concatenated: Concatenated::of(source, programs),
            on_host,
        }
    }
}

/// Returns the names of tensors that are first values of training steps, and no constants of a program. First values of
/// other modules are on the device: their sessions begin often.
pub(super) fn first_values(programs: &[Arc<Program>]) -> BTreeSet<String> {
    let (steps, others): (Vec<_>, Vec<_>) =
        programs.iter().partition(|program| program.train.is_some());
    let firsts = |programs: Vec<&Arc<Program>>| -> BTreeSet<String> {
        let states = programs.into_iter().flat_map(|program| &program.states);
        let names = states.filter_map(|state| match &state.first {
            First::Tensor(name) => Some(name.clone()),
            First::Zeros | First::Output { .. } => None,
        });
        names.collect()
    };
    let mut names = firsts(steps);
    let bound = programs.iter().flat_map(|program| &program.steps);
    let bound = bound.flat_map(|step| step.binding.values());
    let eager = programs.iter().flat_map(|program| &program.eager);
    let constants: BTreeSet<&String> = bound
        .chain(eager.flat_map(|exported| &exported.weights))
        .collect();
    let others = firsts(others);
    names.retain(|name| !constants.contains(name) && !others.contains(name));
    names
}

/// The names of tensors to concatenate, a list for each resulting tensor.
#[derive(Default)]
pub(super) struct Concatenated(BTreeSet<Vec<String>>);

/// The alignment of tensors on a device, as of CUDA's allocator.
const ALIGNMENT: usize = 256;

impl Concatenated {
    /// Reads the concatenated tensors of programs from the records of their artifacts. An unreadable record is ignored
    /// here; the load of its program reports it.
    pub fn of(source: &dyn Source, programs: &[Arc<Program>]) -> Self {
        let mut known: HashMap<Digest, Vec<Vec<String>>> = HashMap::new();
        let mut lists = BTreeSet::new();
        for step in programs.iter().flat_map(|program| &program.steps) {
            let concatenated = known.entry(step.artifact).or_insert_with(|| {
                let prepared = source
                    .artifact(&step.artifact)
                    .map(|record| record.prepared);
                let concatenated = prepared
                    .iter()
                    .flatten()
                    .filter_map(|constant| constant.call.joined());
                let names = |list: Vec<&str>| list.into_iter().map(str::to_owned).collect();
                concatenated.map(names).collect()
            });
            for list in concatenated {
                let names = list.iter().map(|name| step.binding.get(name).cloned());
                lists.extend(names.collect::<Option<Vec<_>>>());
            }
        }
        Self(lists)
    }

    /// Returns the offset of each of these tensors, given their names and bytes, and the total bytes. A tensor of two
    /// lists goes with the larger list. A list is ignored if the length of one of its tensors is not a multiple of the
    /// alignment.
    pub fn places(&self, tensors: &[(&str, usize)]) -> (Vec<usize>, usize) {
        let index: HashMap<&str, usize> = (tensors.iter().enumerate())
            .map(|(i, (name, _))| (*name, i))
            .collect();
        let mut list_of: HashMap<usize, Vec<usize>> = HashMap::new();
        let mut taken = BTreeSet::new();
        let known = |list: &Vec<String>| -> Option<Vec<usize>> {
            (list.iter())
                .map(|name| index.get(name.as_str()).copied())
                .collect()
        };
        let mut lists: Vec<Vec<usize>> = self.0.iter().filter_map(known).collect();
        lists.sort_by_key(|list| Reverse(list.iter().map(|&i| tensors[i].1).sum::<usize>()));
        for list in lists {
            let distinct: BTreeSet<usize> = list.iter().copied().collect();
            let aligned = list.iter().all(|&i| tensors[i].1.is_multiple_of(ALIGNMENT));
            if aligned && distinct.len() == list.len() && distinct.is_disjoint(&taken) {
                taken.extend(distinct);
                list_of.extend(list.iter().map(|&i| (i, list.clone())));
            }
        }
        let mut places = vec![None; tensors.len()];
        let mut total = 0;
        for i in 0..tensors.len() {
            for &i in list_of.get(&i).map_or(&[i][..], Vec::as_slice) {
                places[i].get_or_insert_with(|| {
                    let at = total;
                    total += tensors[i].1.next_multiple_of(ALIGNMENT);
                    at
                });
            }
        }
        (places.into_iter().flatten().collect(), total)
    }
}

/// Returns a view of tensors as one along their first axis; none if they are not contiguous in one memory.
pub(super) fn as_one(call: &Recipe, parts: &[Handle]) -> Option<Handle> {
    let first = parts.first().filter(|_| call.joined().is_some())?.meta();
    let (_, row) = first.sizes().split_first()?;
    let (mut rows, mut end) = (0, first.address());
    for part in parts {
        let part: Meta<'_> = part.meta();
        let (more, rest) = part.sizes().split_first()?;
        let alike = part.dtype() == first.dtype() && part.storage() == first.storage();
        let dense = *part.strides() == contiguous(part.sizes())[..];
        if !alike || !dense || rest != row || part.address() != end {
            return None;
        }
        rows += more;
        end += bytes_of(part.sizes(), part.dtype()?);
    }
    let sizes = [&[rows], row].concat();
    let view = parts[0].view(&sizes, &contiguous(&sizes), 0, first.dtype()?);
    view.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake::{self, Fake, Memory};
    use precast_store::record::{Dtype, Eager, Operand, State, Train, TrainPart};

    fn lists(lists: &[&[&str]]) -> Concatenated {
        let list = |names: &&[&str]| names.iter().map(|name| (*name).to_owned()).collect();
        Concatenated(lists.iter().map(list).collect())
    }

    fn cat(parts: usize, axis: i64) -> Recipe {
        let parts = (0..parts)
            .map(|i| Operand::Constant(format!("c{i}")))
            .collect();
        let arguments = vec![
            ("tensors".to_owned(), Operand::Tensors(parts)),
            ("dim".to_owned(), Operand::Int(axis)),
        ];
        Recipe {
            operator: "aten::cat".to_owned(),
            arguments,
        }
    }

    #[test]
    fn first_values_of_training_steps_stay_on_the_host() {
        let mut memory = Memory::default();
        let mut step = memory.add("train", &Fake::sized(2, 2));
        let state = |name: &str| State {
            name: name.to_owned(),
            layout: fake::layout(Dtype::Float32, &[2]),
            dims: vec![None],
            first: First::Tensor(name.to_owned()),
        };
        step.train = Some(Train {
            part: TrainPart::Step,
            optimizer: "adamw".to_owned(),
        });
        step.states = ["a", "b", "c", "d"].map(state).into();
        step.steps.clear();
        let names = |programs: &[&Program]| {
            let programs: Vec<_> = programs.iter().map(|&one| Arc::new(one.clone())).collect();
            let names: Vec<String> = first_values(&programs).into_iter().collect();
            names.concat()
        };
        assert_eq!(names(&[&step]), "abcd");
        // An artifact of the release reads `b`, its exported graph `c`, and sessions of another module begin with `d`.
        let mut other = memory.add("f", &Fake::sized(2, 2).salted(1));
        let constant = other.steps[0].binding.keys().next().unwrap().clone();
        other.steps[0].binding.insert(constant, "b".to_owned());
        other.eager = Some(Eager {
            artifact: other.id,
            weights: vec!["c".to_owned()],
        });
        other.states = vec![state("d")];
        assert_eq!(names(&[&step, &other]), "a");
        assert_eq!(names(&[&other]), "");
    }

    #[test]
    fn concatenated_tensors_have_no_gap_and_others_stay_in_order() {
        let names = ["k.b", "k", "q.b", "q", "v", "z"];
        let bytes = [100, 512, 100, 512, 256, 1];
        let tensors: Vec<_> = names.into_iter().zip(bytes).collect();
        let plain = Concatenated::default().places(&tensors);
        assert_eq!(plain, (vec![0, 256, 768, 1024, 1536, 1792], 2048));
        // `k`, `q` and `v` are where the first of them is met; biases of 100 bytes would leave gaps.
        let concatenated = lists(&[&["q", "k", "v"], &["q.b", "k.b"]]).places(&tensors);
        assert_eq!(concatenated, (vec![0, 768, 1536, 256, 1280, 1792], 2048));
    }

    #[test]
    fn a_tensor_goes_with_its_largest_list_and_unknown_names_are_ignored() {
        let tensors = [("a", 256), ("b", 256), ("c", 256)];
        let some = lists(&[&["a", "c"], &["c", "gone"], &["c", "c"], &["c", "b", "a"]]);
        assert_eq!(some.places(&tensors), (vec![512, 256, 0], 768));
    }

    #[test]
    fn parts_side_by_side_are_concatenated_without_a_copy() {
        let numbers: Vec<f32> = (0..24u8).map(f32::from).collect();
        let memory = Handle::of(&numbers, &[24], Dtype::Float32).unwrap();
        let view = |from: usize, shape: [i64; 2], stride: [i64; 2]| {
            let view = memory.view(&shape, &stride, from * 4, Dtype::Float32);
            view.unwrap()
        };
        let part = |from: usize, rows: i64| view(from, [rows, 4], [4, 1]);
        let parts = [part(4, 2), part(12, 1), part(16, 2)];
        let whole = as_one(&cat(3, 0), &parts).unwrap();
        assert_eq!(whole.read::<f32>().unwrap(), numbers[4..]);
        assert_eq!(whole.meta().address(), parts[0].meta().address());
        // Out of order, with a gap, along another axis, in another memory, or transposed.
        assert!(as_one(&cat(2, 0), &[part(12, 1), part(4, 2)]).is_none());
        assert!(as_one(&cat(2, 0), &[part(4, 1), part(12, 1)]).is_none());
        assert!(as_one(&cat(3, 1), &parts).is_none());
        let separate = [part(4, 2), part(12, 1).copied().unwrap()];
        assert!(as_one(&cat(2, 0), &separate).is_none());
        let square = |from: usize, stride| view(from, [2, 2], stride);
        assert!(as_one(&cat(2, 0), &[square(0, [1, 2]), square(4, [2, 1])]).is_none());
    }
}
