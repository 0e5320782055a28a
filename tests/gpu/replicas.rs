//! One model on two devices.

use precast::{Device, Runtime};
use tch::Tensor;

use super::{encode, faults::current_device, inputs, skipped, store};

#[test]
fn calls_are_spread_over_two_devices() {
    let Some(store) = store() else { return };
    let devices = tch::Cuda::device_count();
    if devices < 2 {
        return skipped(&format!("{devices} CUDA device"));
    }
    assert_eq!(current_device(Some(0)), 0);
    let runtime = Runtime::new(&store, [Device::Cuda(0), Device::Cuda(1)]).unwrap();
    let runtime = runtime.inputs(precast::runtime::Inputs::MayCopy);
    let model = runtime.load("minilm").unwrap();
    let (ids, mask) = inputs(1, 20);
    let on = |place: tch::Device| (ids.to_device(place), mask.to_device(place));
    let near = |tensor: &Tensor, want: &Tensor| {
        let error = (tensor.to_device(tch::Device::Cpu) - want).abs().max();
        assert!(f64::try_from(error).unwrap() < 2e-2);
    };
    let want = encode(&model, &ids, &mask).to_device(tch::Device::Cpu);
    // A device's tensors are answered there.
    for ordinal in 0..2 {
        let place = tch::Device::Cuda(ordinal);
        let (ids, mask) = on(place);
        let answer = encode(&model, &ids, &mask);
        assert_eq!(answer.device(), place);
        near(&answer, &want);
    }
    // Tensors of the host go to each in turns.
    let before: Vec<u64> = model.devices().iter().map(|d| d.answered).collect();
    let (ids, mask) = on(tch::Device::Cpu);
    for _ in 0..20 {
        near(&encode(&model, &ids, &mask), &want);
    }
    for (device, before) in model.devices().iter().zip(before) {
        assert_eq!(device.answered - before, 10, "{device:?}");
        assert_eq!(device.broken, None);
    }
    model.swap(&runtime.weights_of("minilm").unwrap()).unwrap();
    near(&encode(&model, &ids, &mask), &want);
    assert_eq!(current_device(None), 0, "the caller's device");
}
