//! Gradients of several devices, added on the first one; parameters, copied from it to the others.
//!
//! | [`Sums`] | for | way of a gradient |
//! |---|---|---|
//! | `Nccl` | CUDA devices, where the process finds NCCL | from device to device: one reduction of all sums, and one broadcast of all parameters |
//! | `Memory` | other devices | through the host's memory, added in the order of the devices |
//!
//! With NCCL, two H100 make 45 times as many steps of a GPT of 12 layers of 1,024 in a second as with sums in memory.
//!
//! Both work on the stream that is current on the caller's thread, after the earlier work of each session. Two devices
//! give the same bits either way. With more, the order of NCCL's additions follows from the connections between them.

use std::{ops::Add as Plus, path::Path};

use precast_store::{Device, record::Dtype};

use crate::{
    Element, RuntimeError, Session, Tensor, TorchError,
    arrays::refused,
    ffi::{Communicators, Handle, Nccl, RawStream, cuda},
};

/// Returns the sum of the tensors of all devices.
pub type Add = fn(&[Tensor]) -> Result<Tensor, TorchError>;

/// Where a trainer adds the gradients of several devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sums {
    /// On the devices, by NCCL.
    Nccl,
    /// In the host's memory.
    Memory,
}

impl Sums {
    /// Returns `nccl` or `memory`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::Memory => "memory",
        }
    }
}

/// What passes between the devices of a trainer.
pub struct Between {
    nccl: Option<&'static Nccl>,
    /// The devices' connections, from the first use on.
    connected: Option<Communicators>,
    /// The sum without NCCL.
    add: Add,
}

impl Between {
    /// Takes NCCL for the sums of these dtypes, if the process finds it and all devices are CUDA's.
    pub fn new(sessions: &[Session<'_>], mut dtypes: impl Iterator<Item = Dtype>) -> Self {
        let on_cuda = |session: &Session<'_>| matches!(session.device(), Device::Cuda(_));
        let fits = sessions.len() > 1 && sessions.iter().all(on_cuda) && dtypes.all(Nccl::adds);
        Self {
            nccl: if fits { Nccl::get() } else { None },
            ..Self::memory(sum)
        }
    }

    /// Takes the host's memory.
    pub fn memory(add: Add) -> Self {
        Self {
            nccl: None,
            connected: None,
            add,
        }
    }

    /// Takes this library for NCCL.
    pub fn take_nccl(&mut self, path: &Path) -> Result<(), RuntimeError> {
        self.nccl = Some(Nccl::open(path).map_err(refused)?);
        Ok(())
    }

    /// Returns the way that it takes.
    pub fn sums(&self) -> Sums {
        match self.nccl {
            Some(_) => Sums::Nccl,
            None => Sums::Memory,
        }
    }

    /// Adds states of all sessions in those of the first one. The others are zero then.
    pub fn gather(
        &mut self,
        sessions: &mut [Session<'_>],
        names: &[String],
    ) -> Result<(), RuntimeError> {
        if sessions.len() == 1 {
            return Ok(());
        }
        let all = tensors(sessions, names)?;
        match self.connected(sessions)? {
            Some(nccl) => nccl.sum(&all, &streams(sessions)?)?,
            None => {
                for at in 0..names.len() {
                    let each = all.iter().map(|one| Tensor(one[at].share()));
                    let total = (self.add)(&each.collect::<Vec<_>>()).map_err(refused)?;
                    all[0][at].copy_from(&total.0).map_err(refused)?;
                }
            }
        }
        let mut others = all[1..].iter().flatten();
        others.try_for_each(Handle::zero).map_err(refused)
    }

    /// Copies states of the first session to the others.
    pub fn spread(
        &mut self,
        sessions: &mut [Session<'_>],
        names: &[String],
    ) -> Result<(), RuntimeError> {
        if sessions.len() == 1 {
            return Ok(());
        }
        if let Some(nccl) = self.connected(sessions)? {
            return nccl.copy(&tensors(sessions, names)?, &streams(sessions)?);
        }
        let (first, others) = sessions.split_at_mut(1);
        for name in names {
            let value = first[0].shared(name)?;
            for other in &mut *others {
                other.set_state(name, &value)?;
            }
        }
        Ok(())
    }

    /// Returns the devices' connections, made on the first call; none without NCCL.
    fn connected(
        &mut self,
        sessions: &[Session<'_>],
    ) -> Result<Option<&mut Communicators>, RuntimeError> {
        if let (Some(nccl), None) = (self.nccl, &self.connected) {
            let _span = tracing::info_span!("nccl").entered();
            let devices: Vec<Device> = sessions.iter().map(Session::device).collect();
            self.connected = Some(Communicators::new(nccl, &devices)?);
        }
        Ok(self.connected.as_mut())
    }
}

/// Returns the tensors of states, by session, after the earlier work on them.
fn tensors(
    sessions: &mut [Session<'_>],
    names: &[String],
) -> Result<Vec<Vec<Handle>>, RuntimeError> {
    let of = |session: &mut Session<'_>| {
        let states = names.iter().map(|name| Ok(session.shared(name)?.0));
        states.collect()
    };
    sessions.iter_mut().map(of).collect()
}

/// Returns the stream of each session's device that is current on this thread.
fn streams(sessions: &[Session<'_>]) -> Result<Vec<RawStream>, RuntimeError> {
    let of = |session: &Session<'_>| match session.device() {
        Device::Cuda(ordinal) => cuda().and_then(|cuda| cuda.current_stream(ordinal)),
        Device::Cpu => Ok(RawStream::NONE),
    };
    let streams: Result<_, TorchError> = sessions.iter().map(of).collect();
    streams.map_err(refused)
}

/// Returns the sum of tensors of one shape, in their order. Halves are added in single precision.
pub fn sum(all: &[Tensor]) -> Result<Tensor, TorchError> {
    fn of<T: Element + Copy + Plus<Output = T>>(all: &[Tensor]) -> Result<Tensor, TorchError> {
        let mut total = all[0].to_vec::<T>()?;
        for other in &all[1..] {
            let other = other.to_vec::<T>()?;
            for (total, other) in total.iter_mut().zip(other) {
                *total = *total + other;
            }
        }
        Tensor::from_slice(&total, &all[0].shape())
    }
    match all[0].dtype() {
        Some(Dtype::Int64) => of::<i64>(all),
        Some(Dtype::Float64) => of::<f64>(all),
        Some(Dtype::Float32) => of::<f32>(all),
        dtype => {
            let single = all.iter().map(|one| one.to_dtype(Dtype::Float32));
            let total = of::<f32>(&single.collect::<Result<Vec<_>, _>>()?)?;
            dtype.map_or(Ok(total.share()), |dtype| total.to_dtype(dtype))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tensors_are_added_in_their_own_dtype() {
        let floats = [Dtype::Float32, Dtype::Float64, Dtype::Bfloat16];
        for dtype in floats.into_iter().chain([Dtype::Int64]) {
            let all = [[1.0_f32, 2.0], [3.0, -2.0], [5.0, 7.0]].map(|one| {
                let made = Tensor::from_slice(&one, &[2]).unwrap();
                made.to_dtype(dtype).unwrap()
            });
            let total = sum(&all).unwrap();
            assert_eq!(total.dtype(), Some(dtype));
            let total = total.to_dtype(Dtype::Float32).unwrap();
            assert_eq!(total.to_vec::<f32>().unwrap(), [9.0, 7.0]);
        }
    }
}
