//! Batches of a safetensors file: rows of its tensors, in an order that a seed decides.
//!
//! A tensor has one row for each example, and a batch as many rows as the step's input. Each pass over the file has
//! another order. Batch `n` is the same in every run with the same file and seed: a checkpoint keeps `n`. Several devices
//! share the rows of as many batches that follow each other.

use std::{cell::RefCell, fs::File, io::Read as _, os::unix::fs::FileExt as _, path::Path};

use anyhow::{Context as _, Result};
use safetensors::tensor::Metadata;

use super::super::exit::Refusal;
use crate::{
    record::{Dtype, Input},
    runtime::{Tensor, command::tensors},
    store::digest::Hasher,
};

/// The rows of a file, by input.
pub(super) struct Data {
    file: File,
    columns: Vec<Column>,
    /// The order of the last pass, with its seed and number.
    order: RefCell<(u64, u64, Vec<u64>)>,
    /// The number of rows of a batch, and of batches in the file.
    rows: usize,
    batches: u64,
    /// The number of batches in the inputs of one call.
    devices: u64,
    /// The digest of its header, its size and samples of its bytes.
    identity: String,
}

struct Column {
    name: String,
    dtype: Dtype,
    /// The shape of the batches of all devices.
    shape: Vec<i64>,
    /// The bytes of a row, and where the first one begins.
    bytes: usize,
    begins: u64,
}

/// The inputs of one call.
pub(super) struct Batch {
    pub tensors: Vec<(String, Tensor)>,
}

impl Batch {
    /// Returns the inputs by name.
    pub fn named(&self) -> Vec<(&str, &Tensor)> {
        let tensors = self.tensors.iter();
        tensors
            .map(|(name, tensor)| (name.as_str(), tensor))
            .collect()
    }
}

impl Data {
    /// Opens a file, and compares its tensors with the inputs of a batch for one device.
    pub fn open(path: &Path, inputs: Vec<&Input>, devices: u64) -> Result<Self> {
        let shown = path.display();
        let file = File::open(path).with_context(|| format!("can't read `{shown}`"))?;
        let (header, data) = header(&file)
            .with_context(|| format!("`{shown}` is no safetensors file, or was cut off"))?;
        let known = header.tensors();
        let (mut columns, mut counts) = (Vec::new(), Vec::new());
        for input in inputs {
            let (name, shape) = (&input.name, &input.layout.shape);
            let refuse = |problem: String| {
                let hint = format!(
                    "a row of `{name}` is {} {:?}",
                    input.layout.dtype,
                    shape.get(1..).unwrap_or_default()
                );
                Refusal::usage(format!("`{shown}`: {problem}"), hint)
            };
            let Some(&batch) = shape.first() else {
                return Err(refuse(format!("input `{name}` has no axis for the examples")).into());
            };
            let view = known.get(name);
            let view = view.ok_or_else(|| refuse(format!("it has no tensor `{name}`")))?;
            let row: Vec<i64> = view.shape.iter().skip(1).map(|&size| size as i64).collect();
            if tensors::dtype_of(view.dtype) != Some(input.layout.dtype) || row != shape[1..] {
                let problem = format!("its tensor `{name}` is {:?} {:?}", view.dtype, view.shape);
                return Err(refuse(problem).into());
            }
            let count = view.shape.first().copied().unwrap_or(0);
            let (begins, ends) = view.data_offsets;
            counts.push((count, batch as usize));
            let mut shape = shape.clone();
            shape[0] *= devices as i64;
            columns.push(Column {
                name: name.clone(),
                dtype: input.layout.dtype,
                shape,
                bytes: (ends - begins) / count.max(1),
                begins: data + begins as u64,
            });
        }
        let &(count, rows) = counts.first().context("the module takes no batch")?;
        if counts.iter().any(|&other| other != (count, rows)) {
            let message =
                format!("`{shown}`: its tensors, or the inputs, have other numbers of rows");
            return Err(Refusal::usage(message, "each has one row for each example").into());
        }
        if count < rows {
            let message = format!("`{shown}` has {count} rows, and a batch {rows}");
            return Err(Refusal::usage(message, "a file has one batch at least").into());
        }
        let identity = identity(&file, data).with_context(|| format!("can't read `{shown}`"))?;
        Ok(Self {
            identity,
            file,
            columns,
            order: RefCell::default(),
            rows,
            batches: (count / rows) as u64,
            devices,
        })
    }

    /// Returns a name of the file's content: the same for the same bytes, and another one for other data.
    pub fn identity(&self) -> &str {
        &self.identity
    }

    /// Returns the rows of a call.
    pub fn rows_of_call(&self) -> u64 {
        self.rows as u64 * self.devices
    }

    /// Returns the inputs of `count` calls from a position on, and the position after them.
    pub fn batches(&self, position: u64, count: u64, seed: u64) -> Result<(Vec<Batch>, u64)> {
        let after = position.checked_add(count.saturating_mul(self.devices));
        let after = after.with_context(|| format!("the position {position} is no batch's"))?;
        let call = |number| self.batch(position + number * self.devices, seed);
        let batches = (0..count).map(call).collect::<Result<_>>()?;
        Ok((batches, after))
    }

    /// Returns the numbers of the rows of a batch.
    fn rows(&self, position: u64, seed: u64) -> Vec<u64> {
        let (pass, rows) = (position / self.batches, self.rows as u64);
        let mut last = self.order.borrow_mut();
        if last.2.is_empty() || (last.0, last.1) != (seed, pass) {
            *last = (seed, pass, order(seed, pass, self.batches * rows));
        }
        let first = (position % self.batches) as usize * self.rows;
        last.2[first..first + self.rows].to_vec()
    }

    /// Returns the inputs of a call: the batches from a position on, one for each device.
    fn batch(&self, position: u64, seed: u64) -> Result<Batch> {
        let positions = position..position + self.devices;
        let rows: Vec<u64> = positions.flat_map(|at| self.rows(at, seed)).collect();
        let tensor = |column: &Column| {
            let mut bytes = vec![0; column.bytes * rows.len()];
            for (&row, into) in rows.iter().zip(bytes.chunks_mut(column.bytes.max(1))) {
                let begins = column.begins + row * column.bytes as u64;
                let read = self.file.read_exact_at(into, begins);
                read.with_context(|| format!("can't read row {row} of `{}`", column.name))?;
                if !is_finite(column.dtype, into) {
                    let message = format!("row {row} of `{}` has NaN or infinity", column.name);
                    let hint = "no step can learn from it: remove the row";
                    return Err(Refusal::failed(message, hint).into());
                }
            }
            let made = Tensor::from_bytes(&bytes, &column.shape, column.dtype)?;
            Ok((column.name.clone(), made))
        };
        let tensors = self.columns.iter().map(tensor).collect::<Result<_>>()?;
        Ok(Batch { tensors })
    }
}

/// Reads the header of a safetensors file. Returns it, and where its tensors begin.
fn header(mut file: &File) -> Result<(Metadata, u64)> {
    let mut length = [0; 8];
    file.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    let size = file.metadata()?.len();
    anyhow::ensure!(length < size, "its header is longer than the file");
    let mut text = Vec::new();
    file.take(length).read_to_end(&mut text)?;
    let header: Metadata = serde_json::from_slice(&text)?;
    let begins = 8 + length;
    let ends = begins + header.data_len() as u64;
    anyhow::ensure!(
        ends == size,
        "its tensors end at byte {ends}, the file at byte {size}"
    );
    Ok((header, begins))
}

/// Returns a short digest of a file's size, its bytes before `data`, and samples of the others: a file of data may be too
/// large to be read for its name.
fn identity(file: &File, data: u64) -> Result<String> {
    const SAMPLES: u64 = 256;
    const BYTES: u64 = 4096;
    let size = file.metadata()?.len();
    let mut hasher = Hasher::default();
    hasher.update(&size.to_le_bytes());
    let mut add = |begins: u64, ends: u64| -> Result<()> {
        let mut bytes = vec![0; (ends - begins) as usize];
        file.read_exact_at(&mut bytes, begins)?;
        hasher.update(&bytes);
        Ok(())
    };
    add(0, data)?;
    let step = ((size - data) / SAMPLES).max(BYTES);
    let mut begins = data;
    while begins < size {
        add(begins, size.min(begins + BYTES))?;
        begins += step;
    }
    Ok(hasher.finish().short())
}

fn is_finite(dtype: Dtype, bytes: &[u8]) -> bool {
    let dtype = match dtype {
        Dtype::Float64 => safetensors::Dtype::F64,
        Dtype::Float32 => safetensors::Dtype::F32,
        Dtype::Float16 => safetensors::Dtype::F16,
        Dtype::Bfloat16 => safetensors::Dtype::BF16,
        _ => return true,
    };
    tensors::is_finite(dtype, bytes)
}

/// Returns the numbers below `count` in a random order, which the seed and the pass decide.
fn order(seed: u64, pass: u64, count: u64) -> Vec<u64> {
    let mut all: Vec<u64> = (0..count).collect();
    let mut state = seed ^ pass.wrapping_mul(0xd134_2543_de82_ef95);
    for last in (1..all.len()).rev() {
        // SplitMix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let other = (mixed ^ (mixed >> 31)) % (last as u64 + 1);
        all.swap(last, other as usize);
    }
    all
}

#[cfg(test)]
mod tests {
    use super::order;

    #[test]
    fn every_pass_has_every_row_in_an_order_of_its_own() {
        let first = order(7, 0, 100);
        assert_eq!(first, order(7, 0, 100));
        assert_ne!(first, order(7, 1, 100));
        assert_ne!(first, order(8, 0, 100));
        let mut sorted = first;
        sorted.sort_unstable();
        assert_eq!(sorted, (0..100).collect::<Vec<_>>());
        assert_eq!(order(0, 0, 1), [0]);
    }
}
