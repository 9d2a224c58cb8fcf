# What went wrong before: a rack described by hand, with a NIC missing on one host.

variables {
  transport = { library = "mooncake", protocol = "rdma" }
  hosts = {
    d1 = { role = "decode", shape = "hgx-b200-infiniband", address = "10.0.0.11", fabric_address = "10.1.0.11", rdma_devices = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"] }
    p1 = { role = "prefill", shape = "hgx-h200-infiniband", address = "10.0.0.21" }
    r1 = { role = "router", shape = "cpu-server", address = "10.0.0.31", also = ["ingress"], ansible_host = "bastion.example" }
  }
}

run "a_rack_becomes_an_inventory" {
  command = plan
  assert {
    condition     = jsonencode(output.inventory.decode) == jsonencode({ d1 = { address = "10.0.0.11", ansible_host = "10.0.0.11", ansible_user = "ubuntu", fabric_address = "10.1.0.11", gpus = 8, rdma_devices = ["mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3", "mlx5_4", "mlx5_5", "mlx5_6", "mlx5_7"], shape = "hgx-b200-infiniband", tilert_protocol = "rdma", tilert_transport = "mooncake" } })
    error_message = jsonencode(output.inventory.decode)
  }
  assert {
    condition     = output.inventory.ingress.r1.ansible_host == "bastion.example" && output.inventory.ingress.r1.address == "10.0.0.31"
    error_message = "Ansible may enter elsewhere than services listen"
  }
}

run "no_hosts" {
  command = plan
  variables {
    hosts = {}
  }
  expect_failures = [var.hosts]
}

run "a_nic_is_missing" {
  command = plan
  variables {
    hosts = {
      d1 = { role = "decode", shape = "hgx-b200-infiniband", address = "10.0.0.11", rdma_devices = ["mlx5_0"] }
      p1 = { role = "prefill", shape = "hgx-h200-infiniband", address = "10.0.0.21" }
      r1 = { role = "router", shape = "cpu-server", address = "10.0.0.31", also = ["ingress"] }
    }
  }
  expect_failures = [var.hosts]
}
