//! Weight sets of the caller's own tensors on a device.

use std::collections::BTreeMap;

use precast::{
    Device, Runtime,
    runtime::{Tensor as Own, WeightSet, command::tensors, cuda::Graphs, errors::TorchError},
};
use tch::Tensor;

use crate::store_with;

const GPU: Device = Device::Cuda(0);

#[test]
fn a_change_in_place_is_read_by_artifacts_and_by_graphs() {
    let Some((store, release)) = store_with("values") else {
        return;
    };
    let stored = store.objects().read(&release.weights.unwrap()).unwrap();
    for graphs in [Graphs::Never, Graphs::Always] {
        let runtime = Runtime::new(&store, GPU).unwrap().graphs(graphs);
        let stored = tensors::read(&stored[..]).unwrap();
        let on_gpu = stored.iter().map(|(name, held)| {
            let held = held.to_device(GPU)?;
            Ok((name.clone(), held))
        });
        let own: BTreeMap<String, Own> = on_gpu.collect::<Result<_, TorchError>>().unwrap();
        let mut rows = Tensor::from(&own["rows.weight"]);
        let set = WeightSet::of(own, GPU).unwrap();
        let model = runtime.load_on("values", &set).unwrap();
        // An exact bucket, one that is padded into, and a size that only the dynamic artifact takes.
        for (batch, seq) in [(4, 16), (3, 9), (9, 40)] {
            let ids = Tensor::arange(batch * seq, (tch::Kind::Int64, tch::Device::Cuda(0)));
            let ids = ids.view([batch, seq]);
            let answer = || Tensor::from(&model.run("forward", &[&ids]).unwrap()[0]);
            let before = answer();
            let _ = rows.g_add_scalar_(1.0);
            assert!(answer().equal(&before.g_add_scalar(1.0)), "{graphs:?}");
            model.swap(&runtime.weights_of("values").unwrap()).unwrap();
            assert!(!answer().equal(&before.g_add_scalar(1.0)), "{graphs:?}");
            model.swap(&set).unwrap();
            assert!(answer().equal(&before.g_add_scalar(1.0)), "{graphs:?}");
        }
    }
}

#[test]
fn a_tensor_that_kernels_can_not_load_vectors_from_is_refused_by_name() {
    if crate::store().is_none() {
        return;
    }
    let flat = Tensor::zeros([65], (tch::Kind::Float, tch::Device::Cuda(0)));
    let part = |from: i64| Own::from(flat.narrow(0, from, 8));
    let of = |tensor: Own| WeightSet::of([("w".to_owned(), tensor)].into(), GPU);
    assert!(of(part(4)).is_ok());
    let error = of(part(1)).err().unwrap().to_string();
    let expected = "tensor `w` can't be bound as a weight: it starts at an address that kernels can't read from";
    assert_eq!(error, expected);
}
