//! Generated inputs for a program without samples, the same in every run.

use precast_runtime::{Tensor, errors::TorchError};
use precast_store::{
    Device,
    record::{Dtype, Input, Program, Sizes},
};

/// The input with the learning rate.
const RATE: &str = "lr";

/// Returns inputs of these sizes: integers within the bounds of the record, or zeros; floats from a normal
/// distribution; positions in a state from the first one on; a learning rate of 0.
pub(crate) fn samples(
    program: &Program,
    sizes: &Sizes,
    device: Device,
) -> Result<Vec<Tensor>, TorchError> {
    drawn(program, sizes, device, |low, _, _| low)
}

/// Returns such inputs, with the last positions of the states.
pub(crate) fn samples_of_full(
    program: &Program,
    sizes: &Sizes,
    device: Device,
) -> Result<Vec<Tensor>, TorchError> {
    drawn(program, sizes, device, |low, count, dim| {
        let end = sizes.get(dim).map(|&size| size - count);
        end.unwrap_or(low).max(low)
    })
}

/// Returns inputs; `first` is the first position by its lowest value, the number of positions and their dimension.
fn drawn(
    program: &Program,
    sizes: &Sizes,
    device: Device,
    first: impl Fn(i64, i64, &str) -> i64,
) -> Result<Vec<Tensor>, TorchError> {
    let mut random = Random(0x5eed);
    let mut sample = |input: &Input| -> Result<Tensor, TorchError> {
        let axes = input.layout.shape.iter().zip(&input.dims);
        let size = |(&fixed, dim): (&i64, &Option<String>)| {
            let named = dim.as_ref().and_then(|dim| sizes.get(dim));
            named.copied().unwrap_or(fixed)
        };
        let (shape, dtype) = (axes.map(size).collect::<Vec<i64>>(), input.layout.dtype);
        let elements = shape.iter().product::<i64>().max(0);
        let count = shape.last().copied().unwrap_or(1).max(1);
        let made = match (dtype, input.bounds.or(input.range)) {
            // Positions follow each other: an artifact may write two equal ones in any order.
            (_, Some([low, _])) if input.within.is_some() => {
                let low = first(low, count, input.within.as_deref().unwrap_or_default());
                let values: Vec<i64> = (0..elements).map(|at| low + at % count).collect();
                Tensor::from_slice(&values, &shape)?
            }
            // The first update of Adam has the sign of each gradient, and rounding decides it where a gradient is zero.
            (_, _) if program.train.is_some() && input.name == RATE => {
                Tensor::zeros(&shape, dtype, Device::Cpu)?
            }
            (dtype, _) if dtype.is_float() => {
                let values: Vec<f32> = (0..elements).map(|_| random.normal()).collect();
                Tensor::from_slice(&values, &shape)?
            }
            (Dtype::Bool, _) => Tensor::from_slice(&vec![true; elements as usize], &shape)?,
            (_, Some([low, high])) => {
                let values: Vec<i64> = (0..elements).map(|_| random.between(low, high)).collect();
                Tensor::from_slice(&values, &shape)?
            }
            (_, None) => Tensor::zeros(&shape, dtype, Device::Cpu)?,
        };
        made.to_dtype(dtype)?.to_device(device)
    };
    program.inputs.iter().map(&mut sample).collect()
}

/// Numbers that look random, the same in every run: SplitMix64.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// From `low` to below `high`; `low` if there is no such number.
    fn between(&mut self, low: i64, high: i64) -> i64 {
        let span = high.wrapping_sub(low).max(1).cast_unsigned();
        low.wrapping_add_unsigned(self.next() % span)
    }

    /// Of the normal distribution around 0 with deviation 1, by the Box-Muller transform.
    fn normal(&mut self) -> f32 {
        let unit = |bits: u64| ((bits >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        let (a, b) = (unit(self.next()), unit(self.next()));
        ((-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos()) as f32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_numbers_are_of_their_distribution() {
        let mut random = Random(7);
        let normal: Vec<f64> = (0..40_000).map(|_| random.normal().into()).collect();
        let mean = normal.iter().sum::<f64>() / normal.len() as f64;
        let square = normal.iter().map(|x| x * x).sum::<f64>() / normal.len() as f64;
        assert!(
            mean.abs() < 0.02 && (square - 1.0).abs() < 0.03,
            "{mean} {square}"
        );
        let mut seen = [0; 5];
        for _ in 0..1000 {
            seen[(random.between(-2, 3) + 2) as usize] += 1;
        }
        assert!(seen.iter().all(|&n| n > 120), "{seen:?}");
        assert_eq!((random.between(4, 4), random.between(4, 1)), (4, 4));
    }
}
