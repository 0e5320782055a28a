//! Tensors of tch and the runtime's own: both directions, one memory.
//!
//! CUDA's are in `tests/gpu/tensors.rs`; numbers of a real model in `examples/tch.rs`, which `tests/numerics` runs.

use std::fs;

use precast::{
    Device,
    record::Dtype,
    runtime::{RuntimeError, Tensor, errors::Problem},
};
use tch::Kind;

use crate::{fake::Fake, flat, ok};

const CPU: tch::Device = tch::Device::Cpu;

/// The kind of each dtype that a module takes.
const KINDS: [(Dtype, Kind); 10] = [
    (Dtype::Float16, Kind::Half),
    (Dtype::Bfloat16, Kind::BFloat16),
    (Dtype::Float32, Kind::Float),
    (Dtype::Float64, Kind::Double),
    (Dtype::Uint8, Kind::Uint8),
    (Dtype::Int8, Kind::Int8),
    (Dtype::Int16, Kind::Int16),
    (Dtype::Int32, Kind::Int),
    (Dtype::Int64, Kind::Int64),
    (Dtype::Bool, Kind::Bool),
];

fn numbers(n: i64) -> tch::Tensor {
    tch::Tensor::arange(n, (Kind::Int, CPU))
}

/// Holds a tensor of tch and one of the runtime's to be one layout over one memory.
fn alike(theirs: &tch::Tensor, ours: &Tensor) {
    assert_eq!(ours.shape(), theirs.size());
    assert_eq!(ours.stride(), theirs.stride());
    assert_eq!(ours.numel(), theirs.numel());
    // Of a tensor without elements torch gives no address.
    if theirs.numel() > 0 {
        assert_eq!(ours.address(), theirs.data_ptr() as usize);
    }
    assert_eq!(ours.device(), Some(Device::Cpu));
}

#[test]
fn writes_of_one_are_read_by_the_other() {
    let mut theirs = numbers(6);
    let mut ours = Tensor::from(theirs.shallow_clone());
    alike(&theirs, &ours);
    let _ = theirs.fill_(5);
    assert_eq!(ours.to_vec::<i32>().unwrap(), [5; 6]);
    ours.zero().unwrap();
    assert_eq!(theirs.sum(Kind::Int64).int64_value(&[]), 0);

    let mut ours = Tensor::from_slice(&[1.0_f32, 2.0, 3.0, 4.0], &[2, 2]).unwrap();
    let theirs = tch::Tensor::from(&ours);
    alike(&theirs, &ours);
    ours.copy_from(&Tensor::from_slice(&[7.0_f32, 8.0], &[2]).unwrap())
        .unwrap();
    assert_eq!(theirs.double_value(&[1, 1]), 8.0);
    let _ = theirs.get(0).fill_(9.0);
    assert_eq!(ours.to_vec::<f32>().unwrap(), [9.0, 9.0, 7.0, 8.0]);
}

#[test]
fn strides_and_offsets_are_kept() {
    let table = numbers(24).view([4, 6]);
    let layouts = [
        table.transpose(0, 1),
        table.slice(1, 1, 6, 2),
        table.narrow(0, 2, 2).narrow(1, 3, 3),
        table.select(1, 4),
        table.narrow(0, 1, 1).expand([5, 6], false),
        table.get(3).get(5),
        table.narrow(0, 4, 0),
        table.as_strided([2, 2, 3], [12, 1, 4], 2),
    ];
    for theirs in layouts {
        let values = Vec::<i32>::try_from(theirs.contiguous().view(-1)).unwrap();
        let ours = Tensor::from(theirs.shallow_clone());
        alike(&theirs, &ours);
        assert_eq!(ours.to_vec::<i32>().unwrap(), values);
        let back = tch::Tensor::from(ours);
        assert!(back.equal(&theirs));
    }

    let table = Tensor::from_slice(&[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], &[3, 4]).unwrap();
    let layouts = [
        table.transpose(0, 1).unwrap(),
        table.narrow(1, 1, 2).unwrap(),
        table.narrow(0, 3, 0).unwrap(),
        table.view(&[2, 3], &[0, 4], 1).unwrap(),
        table.view(&[], &[], 11).unwrap(),
    ];
    for ours in layouts {
        let theirs = tch::Tensor::from(&ours);
        alike(&theirs, &ours);
        let values = Vec::<i32>::try_from(theirs.contiguous().view(-1)).unwrap();
        assert_eq!(ours.to_vec::<i32>().unwrap(), values);
    }
}

#[test]
fn every_dtype_of_a_module_goes_both_ways() {
    assert_eq!(KINDS.map(|(dtype, _)| dtype).len(), Dtype::ALL.len());
    for (dtype, kind) in KINDS {
        let theirs = (numbers(4) - 1).to_kind(kind);
        let ours = Tensor::from(theirs.shallow_clone());
        assert_eq!(ours.dtype(), Some(dtype));
        alike(&theirs, &ours);
        let back = tch::Tensor::from(ours);
        assert_eq!(back.kind(), kind);
        let ours = Tensor::zeros(&[2, 0, 3], dtype, Device::Cpu).unwrap();
        assert_eq!(tch::Tensor::from(&ours).kind(), kind);
        alike(&tch::Tensor::from(&ours), &ours);
    }
}

#[test]
fn unsupported_tensors_convert_and_are_refused_as_inputs() {
    let complex = tch::Tensor::zeros([2, 2], (Kind::ComplexFloat, CPU));
    let sparse = tch::Tensor::eye(2, (Kind::Float, CPU)).to_sparse(None, None::<i64>, None::<i64>);
    let quantised =
        tch::Tensor::ones([2], (Kind::Float, CPU)).quantize_per_tensor(0.1, 0, Kind::QInt8);
    let undefined = tch::Tensor::new();
    let model = ok(&[Fake::sized(2, 2)]);
    let cases = [
        (complex, "a dtype no artifact takes (torch's number 9)"),
        (sparse, "float32"),
        (quantised, "a dtype no artifact takes (torch's number 12)"),
        (undefined, ""),
    ];
    for (theirs, name) in cases {
        let ours = Tensor::from(theirs.shallow_clone());
        assert!(ours.dtype_name().contains(name), "{ours:?}");
        for error in [
            ours.to_bytes().map(drop),
            ours.view(&[1], &[1], 0).map(drop),
        ] {
            let error = error.unwrap_err().to_string();
            assert!(error.contains(name) && !error.is_empty(), "{error}");
        }
        let error = model.run("f", &[&ours]).unwrap_err();
        assert_eq!(error.name(), "BadInput", "{error}");
        let numel = ours.numel();
        let back = tch::Tensor::from(ours);
        assert_eq!(back.defined(), theirs.defined());
        match back.defined() {
            true => assert_eq!(back.kind(), theirs.kind()),
            false => assert_eq!(numel, 0),
        }
    }
}

#[test]
fn a_tensor_that_records_gradients_is_written_by_nobody_else() {
    // A load opens the shim, which takes libtorch's words off stderr.
    let _model = ok(&[Fake::sized(2, 2)]);
    let theirs = tch::Tensor::ones([3], (Kind::Float, CPU)).set_requires_grad(true);
    let mut ours = Tensor::from(theirs.shallow_clone());
    assert_eq!(ours.to_vec::<f32>().unwrap(), [1.0; 3]);
    let error = ours.zero().unwrap_err().to_string();
    assert!(error.contains("requires grad"), "{error}");
    assert_eq!(theirs.sum(Kind::Float).double_value(&[]), 3.0);
}

#[test]
fn the_memory_lives_as_long_as_the_last_that_uses_it() {
    let theirs = numbers(1000);
    let ours = Tensor::from(theirs.shallow_clone());
    let view = ours.narrow(0, 990, 10).unwrap();
    drop(theirs);
    drop(ours);
    let back = tch::Tensor::from(&view);
    drop(view);
    let _other = numbers(1000).fill_(-1);
    assert_eq!(back.int64_value(&[9]), 999);

    let ours = Tensor::from_slice(&[3_i64; 1000], &[1000]).unwrap();
    let theirs = tch::Tensor::from(&ours).slice(0, 0, 1000, 7);
    drop(ours);
    let _other = numbers(2000).fill_(-1);
    assert_eq!(theirs.sum(Kind::Int64).int64_value(&[]), 3 * 143);
}

/// Bytes of memory that the process has.
fn resident() -> usize {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = statm.split(' ').nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[test]
fn the_memory_is_freed_with_the_last_that_uses_it() {
    const BYTES: i64 = 32 << 20;
    let before = resident();
    for round in 0..40 {
        let ours = Tensor::zeros(&[BYTES], Dtype::Uint8, Device::Cpu).unwrap();
        let theirs = tch::Tensor::from(&ours);
        let again = Tensor::from(theirs.shallow_clone());
        // In every order.
        match round % 3 {
            0 => drop((ours, theirs, again)),
            1 => drop((again, theirs, ours)),
            _ => std::thread::spawn(move || drop((theirs, again, ours)))
                .join()
                .unwrap(),
        }
    }
    let grown = resident().saturating_sub(before) as i64;
    assert!(grown < 8 * BYTES, "{grown} bytes of 40 tensors are kept");
}

#[test]
fn they_are_inputs_and_outputs_of_a_call() {
    let model = ok(&[Fake::sized(2, 3)]);
    let theirs = numbers(6).view([2, 3]).to_kind(Kind::Float);
    let out = model.run("f", &[&theirs]).unwrap();
    let answer = tch::Tensor::from(&out[0]);
    alike(&answer, &out[0]);
    assert!(answer.equal(&(&theirs * 2)));
    // An answer outlives its call, and is an input of the next one.
    drop(out);
    let again = model.run("f", &[Tensor::from(answer)]).unwrap();
    assert_eq!(flat(&again[0]), [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]);

    // Strides that the artifact was not compiled for are refused, not copied behind the caller's back.
    let error = model.run("f", &[theirs.transpose(0, 1).contiguous().transpose(0, 1)]);
    let Err(RuntimeError::BadInput { problem, .. }) = error else {
        panic!("{error:?}")
    };
    assert!(matches!(problem, Problem::Strides { .. }), "{problem:?}");
}

#[test]
fn a_device_that_is_not_there_is_an_error() {
    // With a GPU, `tests/gpu` has the rest.
    if precast::runtime::cuda::device_memory(Device::Cuda(0)).is_ok() {
        return;
    }
    let ours = Tensor::from(numbers(2));
    assert!(ours.to_device(Device::Cuda(0)).is_err());
    assert!(Tensor::zeros(&[2], Dtype::Int32, Device::Cuda(0)).is_err());
    let same = ours.to_device(Device::Cpu).unwrap();
    alike(&tch::Tensor::from(same), &ours);
}
