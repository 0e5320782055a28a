//! Tensors of tch and capsules of DLPack on a device: the same memory both ways, and an error where a host's is wanted.

use precast::{
    Device,
    record::Dtype,
    runtime::{
        cuda::Stream,
        dlpack::{self, Capsule},
    },
};
use tch::{Kind, Tensor};

use crate::store;

#[test]
fn tensors_of_tch_on_a_device_go_both_ways_without_a_copy() {
    if store().is_none() {
        return;
    }
    let cuda = tch::Device::Cuda(0);
    let theirs = Tensor::arange(12, (Kind::Float, cuda))
        .view([3, 4])
        .transpose(0, 1)
        .narrow(0, 1, 2);
    let ours = precast::runtime::Tensor::from(theirs.shallow_clone());
    assert_eq!(ours.device(), Some(Device::Cuda(0)));
    assert_eq!(ours.address(), theirs.data_ptr() as usize);
    assert_eq!((ours.shape(), ours.stride()), (vec![2, 3], vec![1, 4]));
    let values = ours.to_vec::<f32>().unwrap();
    assert_eq!(values, [1.0, 5.0, 9.0, 2.0, 6.0, 10.0]);

    let mut ours = precast::runtime::Tensor::zeros(&[2, 2], Dtype::Int64, Device::Cuda(0)).unwrap();
    let mut theirs = Tensor::from(&ours);
    assert_eq!(theirs.device(), cuda);
    let _ = theirs.fill_(3);
    assert_eq!(ours.to_vec::<i64>().unwrap(), [3; 4]);
    ours.zero().unwrap();
    assert_eq!(theirs.sum(Kind::Int64).int64_value(&[]), 0);
    let there = ours.to_device(Device::Cuda(0)).unwrap();
    assert_eq!(there.address(), ours.address());
    let here = Tensor::from(ours.to_device(Device::Cpu).unwrap());
    assert_eq!(here.device(), tch::Device::Cpu);
}

#[test]
fn a_capsule_on_a_device_goes_both_ways_and_the_consumers_stream_waits() {
    use precast::runtime::Tensor;

    if store().is_none() {
        return;
    }
    let cuda = Device::Cuda(0);
    let number = || dlpack::stream(cuda).unwrap().unwrap();
    assert_eq!(number(), 1, "the default stream");
    assert_eq!(dlpack::stream(Device::Cpu).unwrap(), None);

    let count = 1 << 26;
    let one = Tensor::from_slice(&[1.0_f32], &[1]).unwrap();
    let one = one.to_device(cuda).unwrap();
    let mut made = Tensor::zeros(&[count], Dtype::Float32, cuda).unwrap();
    let zeros = made.contiguous().unwrap();
    let consumer = Stream::new(0).unwrap();
    // Pending work of the default stream comes before the consumer's work.
    for _ in 0..100 {
        made.copy_from(&zeros).unwrap();
    }
    made.copy_from(&one).unwrap();
    let at = made.address();
    let last = made.narrow(0, count - 2, 2).unwrap();
    let capsule: Capsule = last.into_dlpack(Some(&consumer)).unwrap();
    drop(made);

    let _scope = consumer.enter().unwrap();
    assert!(number() > 2, "a stream of torch's pool");
    let back = Tensor::from_dlpack(capsule).unwrap();
    assert_eq!(back.to_vec::<f32>().unwrap(), [1.0, 1.0]);
    assert_eq!(back.device(), Some(cuda));
    assert_eq!(back.address(), at + (count as usize - 2) * 4);
}
