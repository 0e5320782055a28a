//! Tensors of tch on a device: the same memory both ways, and an error where a host's is wanted.

use precast::{Device, record::Dtype};
use tch::{Kind, Tensor};

use crate::store;

#[test]
fn tensors_of_tch_on_a_device_go_both_ways_without_a_copy() {
    if store("tensors_of_tch_on_a_device_go_both_ways_without_a_copy").is_none() {
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
    assert_eq!(
        ours.to_vec::<f32>().unwrap(),
        [1.0, 5.0, 9.0, 2.0, 6.0, 10.0]
    );

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
